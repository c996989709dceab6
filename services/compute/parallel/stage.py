"""Stage: some of a model's layers, one after the other (pipeline parallelism). The first stage has the
embedding and the head, too, so what the last one computes comes back to it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.compute.parallel.distributed import Arriving, Pipe


@dataclass(frozen=True, slots=True)
class Stage:
    number: int
    count: int
    pipe: Pipe | None  # None: another rank of this stage speaks with the other stages

    @property
    def is_first(self) -> bool:
        return self.number == 0

    def receive(self, num_tokens: int, hidden_size: int, dtype: torch.dtype) -> Tensor | None:
        """Receive what the stage before has made of a step's tokens, [tokens, hidden]."""
        return None if self.pipe is None else self.pipe.receive((num_tokens, hidden_size), dtype).wait()

    def pass_on(self, x: Tensor, rows: Tensor) -> "Tensor | Returning":
        """Hand a step's tokens to the next stage: x [tokens, hidden]; the last one, those whose
        logits will be asked for, rows [R]. Returns what the whole model makes of these, where the head
        is."""
        if self.pipe is None:
            return x
        self.pipe.send(x if self.number + 1 < self.count else x[rows])
        return Returning(self.pipe.receive((len(rows), x.shape[1]), x.dtype), rows.clone()) if self.is_first else x


@dataclass(frozen=True, slots=True)
class Returning:
    """The last layer's results, [tokens, hidden], on their way back from the last stage: some rows
    of them."""

    arriving: Arriving
    rows: Tensor  # [R] int64, rising: those that come

    def __getitem__(self, rows: Tensor) -> Tensor:
        return self.arriving.wait()[torch.searchsorted(self.rows, rows)]
