"""Kv: where a sequence's keys and values are. The modules of cache/ change it, and the verbs below."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


class BlockTable(list[int]):
    """The ids of a sequence's blocks. Steps hold them as a tuple, which is the same object as long as
    nothing changes: a table kept from the last step need not be compared block by block."""

    _frozen: tuple[int, ...] | None = None

    @property
    def frozen(self) -> tuple[int, ...]:
        if self._frozen is None:
            self._frozen = tuple(self)
        return self._frozen

    def append(self, block_id: int) -> None:
        self._frozen = None
        super().append(block_id)

    def extend(self, block_ids: Iterable[int]) -> None:
        self._frozen = None
        super().extend(block_ids)

    def clear(self) -> None:
        self._frozen = None
        super().clear()

    def __setitem__(self, at: Any, value: Any) -> None:
        self._frozen = None
        super().__setitem__(at, value)


@dataclass(slots=True, eq=False)
class Kv:
    block_table: BlockTable = field(default_factory=BlockTable)  # one block id per block_size tokens
    num_computed: int = 0  # tokens whose KV is written, or will be by the step that was scheduled last
    block_hashes: list[bytes] = field(default_factory=list)  # of the first full blocks, as far as needed
    num_committed_blocks: int = 0  # the first blocks, which the prefix cache has been offered
    num_shared_blocks: int = 0  # blocks that others held already when the sequence began
    has_shared_tail: bool = False  # the block that is written next may be another's as well
    is_restored: bool = False  # a second tier was asked for its blocks
    slot: int = 0  # of a model that keeps states: see cache/state_slots.py
    num_folded: int = 0  # tokens that its state stands behind, which it can't go back behind

    def advance(self, num_tokens: int) -> None:
        """A step was scheduled that computes up to the first num_tokens."""
        self.num_computed = num_tokens

    def rewind(self, num_tokens: int) -> None:
        """Nothing that is computed behind the first num_tokens stands; nothing at all where its state stands
        behind more."""
        if num_tokens < self.num_folded:
            num_tokens = self.num_folded = 0
        self.num_computed = min(self.num_computed, num_tokens)

    def recompute(self, num_tokens: int, block_size: int) -> None:
        """All behind the first num_tokens is computed again. Its last block may be in the prefix cache
        by now, so it is copied before it is written."""
        self.rewind(num_tokens)
        self.num_committed_blocks = min(self.num_committed_blocks, self.num_computed // block_size)
        self.has_shared_tail = True

    def clear(self) -> None:
        """All blocks were given back."""
        self.block_table.clear()
        self.num_computed = self.num_committed_blocks = self.num_shared_blocks = self.num_folded = 0
        self.has_shared_tail = self.is_restored = False
