"""The keys and values that a drafting model reads: the target's, or a cache of its own over the same
block ids."""

from dataclasses import dataclass
from typing import Protocol

from services.compute.sequence import Sequence


class DraftKV(Protocol):
    def num_known(self, sequence: Sequence) -> int:
        """How many of the sequence's first tokens have them; fewer than all."""
        ...

    def wrote(self, sequence: Sequence, first: int, last: int) -> None:
        """The sequence's tokens [first, last) have them now."""
        ...


class TargetKV:
    """The target's own, for a model of the same shape. It reads what the target has written. What it
    writes itself is of tokens that do not count as computed, and the target writes there before it
    reads."""

    def num_known(self, sequence: Sequence) -> int:
        return sequence.kv.num_computed

    def wrote(self, sequence: Sequence, first: int, last: int) -> None:
        pass


@dataclass(slots=True)
class BlockContent:
    """The tokens whose keys and values a block of the drafting model's cache holds."""

    parent: int  # the key of the block before it, 0: it is the first
    token_ids: list[int]
    key: int  # of these tokens and all before them


class OwnKV:
    """A cache of the drafting model's own: it has the target's blocks, so block tables are the same,
    and it falls behind. A block says what it holds itself. So it does not matter how a sequence came
    by its blocks: it may have been preempted, or share them, or have found them in the prefix
    cache."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._blocks: list[BlockContent | None] = [None] * num_blocks

    def num_known(self, sequence: Sequence) -> int:
        size, parent, known = self.block_size, 0, 0
        for block_id in sequence.kv.block_table:
            held = self._blocks[block_id]
            if held is None or held.parent != parent:
                break
            count = num_equal(held.token_ids, sequence.tokens.ids[known : known + size])
            known += count
            if count < size:
                break
            parent = held.key
        return min(known, len(sequence.tokens) - 1)

    def wrote(self, sequence: Sequence, first: int, last: int) -> None:
        size, table = self.block_size, sequence.kv.block_table
        for number in range(first // size, (last - 1) // size + 1):
            before = self._blocks[table[number - 1]] if number else None
            parent = before.key if before is not None else 0
            token_ids = sequence.tokens.ids[number * size : min(last, (number + 1) * size)]
            self._blocks[table[number]] = BlockContent(parent, token_ids, hash((parent, *token_ids)))


def num_equal(some: list[int], others: list[int]) -> int:
    """How many of the first numbers of both are the same."""
    if some == others:
        return len(some)
    return next(
        (at for at, (one, other) in enumerate(zip(some, others, strict=False)) if one != other),
        min(len(some), len(others)),
    )
