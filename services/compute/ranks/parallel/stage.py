"""PipelineStage: some of a model's layers, one after the other (pipeline parallelism). The first stage has the
embedding and the head, too, so what the last one computes comes back to it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.compute.ranks.parallel.distributed import Arriving, Pipe


@dataclass(frozen=True, slots=True)
class PipelineStage:
    number: int
    count: int
    pipe: Pipe | None  # None: another rank of this stage speaks with the other stages
    layers: tuple[range, ...] = ()  # of a model, by stage

    @property
    def is_first(self) -> bool:
        return self.number == 0

    def place_of(self, tap: int) -> tuple[int, int]:
        """The stage that a layer is in, and its number there; the number of layers itself stands for
        what the last one makes."""
        stage = next((number for number, each in enumerate(self.layers) if tap in each), self.count - 1)
        return stage, tap - self.layers[stage].start

    def receive(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> Tensor | None:
        """Receive what the stage before has made of a step's tokens, [tokens, hidden]."""
        return (
            None if self.pipe is None else self.pipe.receive((num_tokens, hidden_size), dtype, self.number - 1).wait()
        )

    def pass_on(
        self, x: Tensor, rows: Tensor, tapped: Tensor | None = None, taps: Sequence[int] = ()
    ) -> "Tensor | Returning":
        """Hand a step's tokens to the next stage: x [tokens, hidden]; the last one, those whose logits
        will be asked for, rows [R]. tapped: what entered those of the model's tapped layers `taps` that
        are here, [tokens, layers * hidden]; it goes to the first stage. Returns what the whole model
        makes of the rows, where the head is."""
        if self.pipe is None:
            return x
        is_last = self.number + 1 == self.count
        self.pipe.send(x[rows] if is_last else x, 0 if is_last else self.number + 1)
        if not self.is_first:
            if tapped is not None:
                self.pipe.send(tapped, 0)
            return x
        arriving = self.pipe.receive((len(rows), x.shape[1]), x.dtype, self.count - 1)
        if tapped is None:
            return Returning(arriving, rows.clone())
        stages = [self.place_of(tap)[0] for tap in taps]
        widths = [stages.count(stage) * x.shape[1] for stage in range(self.count)]
        pieces = [self.pipe.receive((len(x), width), x.dtype, stage) for stage, width in enumerate(widths) if stage]
        return Returning(arriving, rows.clone(), TappedStages([Arriving(tapped.clone()), *pieces], stages))


@dataclass(frozen=True, slots=True)
class TappedStages:
    """The inputs of the tapped layers in a step, on its way to the first stage."""

    pieces: list[Arriving]  # by stage, [tokens, its layers * hidden]
    stages: list[int]  # where each of the layers is

    def take(self) -> Tensor:
        """[tokens, layers * hidden], in the order of the taps."""
        numbers, columns = {stage: self.stages.count(stage) for stage in self.stages}, {}
        for stage, number in numbers.items():
            columns[stage] = iter(self.pieces[stage].wait().chunk(number, dim=1))
        return torch.cat([next(columns[stage]) for stage in self.stages], dim=1)


@dataclass(frozen=True, slots=True)
class Returning:
    """The last layer's results, [tokens, hidden], on their way back from the last stage: some rows
    of them."""

    arriving: Arriving
    rows: Tensor  # [R] int64, rising: those that come
    tapped: TappedStages | None = None

    def __getitem__(self, rows: Tensor) -> Tensor:
        return self.arriving.wait()[torch.searchsorted(self.rows, rows)]
