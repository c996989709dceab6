"""Share: which part of a model is a rank's.

Every layer is cut by its outputs, and what it computes is gathered. A column of a product depends on
nothing but the whole row of its inputs, so any number of ranks gives the bytes of one. Nothing is
ever summed over ranks.
"""

from dataclasses import dataclass

from shared.process.errors import StartupError

UNIT = 32  # columns that kernels compute together


@dataclass(frozen=True, slots=True)
class Share:
    """The rank's place among those that divide every layer (tensor parallelism)."""

    rank: int = 0
    size: int = 1

    def part(self, n: int, unit: int = UNIT) -> range:
        """The rank's part of n: whole units, but for the last of all. The first ranks may have a unit
        more, and the last ones none."""
        return self.parts(n, unit)[self.rank]

    def parts(self, n: int, unit: int = UNIT) -> tuple[range, ...]:
        """All ranks' parts, in their order: together range(n)."""
        each, more = divmod(-(-n // unit), self.size)
        stops = [0, *(((rank + 1) * each + min(rank + 1, more)) * unit for rank in range(self.size))]
        return tuple(range(min(first, n), min(last, n)) for first, last in zip(stops[:-1], stops[1:], strict=True))


WHOLE = Share()


def check_stages(count: int, num_layers: int) -> None:
    """Raises StartupError for fewer layers than stages."""
    if num_layers < count:
        raise StartupError(
            f"--pipeline-parallel-size {count}: the model has {num_layers} layers, and each stage needs one"
        )


def layers_of_stage(number: int, count: int, num_layers: int, head: float) -> range:
    """The layers of one of `count` stages (pipeline parallelism), one at least where there are as many.
    head: how many layers the LM head is worth: the first stage has so many fewer."""

    def end(number: int) -> int:
        """Where the first `number` stages end."""
        fair = round((num_layers + head) * number / count - head)
        return max(number, min(fair, num_layers - count + number)) if number else 0

    return range(end(number), end(number + 1))


@dataclass(frozen=True, slots=True)
class Portion:
    """Which of a model's weights a process has: a part of each of its stage's layers."""

    share: Share = WHOLE
    layers: range | None = None  # of its stage (pipeline parallelism); None: all
    has_embedding: bool = True
    has_head: bool = True
    is_sharded: bool = (
        False  # rank 0 computes with the parts of all: a KV head is on one of them, and the head is whole
    )


EVERYTHING = Portion()
