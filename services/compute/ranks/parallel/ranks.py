"""Ranks: processes that compute a model together, each some columns of every layer.

They only gather. Each rank writes its part of a result, and `all_gather_in_place` makes it whole. Between two
gathers no rank writes what others still read, if results follow each other in the same order on all
ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from services.compute.ranks.parallel.heads import HeadsOfRank
from services.compute.ranks.parallel.share import Share


class Ranks(Protocol):
    share: Share

    @property
    def meeting(self) -> int | None:
        """The address of the barrier that completes whatever lies in a region; None: there is none,
        `all_gather_in_place` has to be called."""
        ...

    def region(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for a result of all ranks, one of REGIONS. It holds what was left in it before."""
        ...

    def all_gather_in_place(self, whole: Tensor, parts: Sequence[range], dim: int = -1) -> None:
        """Every rank has written parts[rank] of a region's dimension; now all have all of it."""
        ...

    def all_gather(self, part: Tensor, parts: Sequence[range], dim: int = -1) -> Tensor:
        """All ranks' parts, side by side. part: as long in this dimension as parts[rank]."""
        ...

    def broadcast(self, name: str, of_first: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Rank 0's tensor, which others have none of, in a region."""
        ...


@dataclass(frozen=True, slots=True)
class Cut:
    """How ranks divide a decoder's layers: heads, and the columns of attention's result, of the hidden
    states and of the MLP's intermediate."""

    ranks: Ranks
    heads: tuple[HeadsOfRank, ...]
    attended: tuple[range, ...]
    hidden: tuple[range, ...]
    intermediate: tuple[range, ...]

    @property
    def rank(self) -> int:
        return self.ranks.share.rank


# gathered results take turns: a rank that is ahead writes one while others still read the other
REGIONS = ("x", "h", "rows", "attended", "intermediate", "logits", "gathered 0", "gathered 1")
REGION_BYTES = 8 << 30  # of addresses; a page takes memory when it is written
MEETING_BYTES = 4096
# of meeting.inc's Meeting: where the number of ranks stands
SIZE_AT = 128
GROUP_BYTES = MEETING_BYTES + len(REGIONS) * REGION_BYTES


class SharedRanks:
    """Ranks on one host: what one has written all see, so a gather is a barrier."""

    def __init__(self, share: Share, memory: Tensor, meet: Callable[[int, int], object]) -> None:
        """memory: [GROUP_BYTES] uint8, the ranks' own, zeros at first; meet: the native barrier."""
        self.share = share
        self.memory = memory
        memory[SIZE_AT : SIZE_AT + 8].view(torch.int64).fill_(share.size)
        self.meeting: int | None = memory.data_ptr()
        self._meet = meet
        self._turn = 0

    def region(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        first = MEETING_BYTES + REGIONS.index(name) * REGION_BYTES
        size = torch.Size(shape).numel() * dtype.itemsize
        assert size <= REGION_BYTES
        return self.memory[first : first + size].view(dtype).view(shape)

    def all_gather_in_place(self, whole: Tensor, parts: Sequence[range], dim: int = -1) -> None:  # noqa: ARG002
        self.meet()

    def all_gather(self, part: Tensor, parts: Sequence[range], dim: int = -1) -> Tensor:
        shape, own = list(part.shape), parts[self.share.rank]
        shape[dim] = parts[-1].stop
        self._turn ^= 1
        whole = self.region(f"gathered {self._turn}", tuple(shape), part.dtype)
        whole.narrow(dim, own.start, len(own)).copy_(part)
        self.meet()
        return whole.clone()

    def broadcast(self, name: str, of_first: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        whole = self.region(name, shape, dtype)
        if of_first is not None:
            whole.copy_(of_first)
        self.meet()
        return whole

    def meet(self) -> None:
        assert self.meeting is not None
        self._meet(self.meeting, 0)
