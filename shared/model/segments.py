"""Segments: parts of a prompt that do not all see each other.

A segment sees some of those before it, and itself. Its positions are its own: they need not continue
those of the segment before. So its keys and values depend only on its position and on the segments
that it sees, and any prompt that has these can reuse them.

In a KV cache each segment begins a block. The positions that remain in its last block are holes,
which no token sees. The answer follows the last segment, which sees all.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from shared.model.prefix_hash import block_hash, segment_root
from shared.model.wire_struct import WireStruct
from shared.process.errors import Invalid

HOLE = -2  # instead of a token id
# slots: segments begin at multiples of it with any block size, so that the same prompt has the same
# sums everywhere. With segments, block sizes are its divisors
SEGMENT_MULTIPLE = 16
MAX_SEGMENTS = 512  # of a prompt


class Segment(WireStruct, frozen=True):
    """A part of a prompt."""

    num_tokens: int
    position: int  # of its first token
    sees: tuple[int, ...] = ()  # segments before it, by number, rising


def check_segments(segments: Sequence[Segment], num_tokens: int) -> None:
    """Raises Invalid if these are not the segments of a prompt of so many tokens."""
    if len(segments) > MAX_SEGMENTS:
        raise Invalid(f"at most {MAX_SEGMENTS} segments, got {len(segments)}")
    for number, segment in enumerate(segments):
        is_rising = all(one < other for one, other in zip((-1, *segment.sees), (*segment.sees, number), strict=True))
        if segment.num_tokens < 1 or segment.position < 0 or not is_rising:
            raise Invalid(f"segment {number} is empty, before the first position, or sees what is not before it")
    if segments and (
        sum(each.num_tokens for each in segments) != num_tokens or len(segments[-1].sees) != len(segments) - 1
    ):
        raise Invalid("the segments are not the whole prompt, or the last one does not see all")


class RowContext(NamedTuple):
    """The blocks that attention reads for a row of tokens that a step computes."""

    blocks: tuple[int, ...]  # block ids, in the order in which attention reads them
    num_tokens: int  # slots in those blocks before the row's first token
    position_shift: int = 0  # position less index among the slots
    block_lens: tuple[int, ...] = ()  # tokens of each block, where some have holes; empty: no block has


class PlainLayout:
    """The layout of a prompt without segments: each token sees all before it, and there are no holes. Has
    the methods of Layout."""

    segments: tuple[Segment, ...] = ()
    starts = (0,)
    num_holes = 0

    def at(self, slot: int) -> int:  # noqa: ARG002
        return 0

    def skip_holes(self, slot: int) -> int:
        return slot

    def num_tokens_in(self, num_slots: int) -> int:
        return num_slots

    def pad(self, token_ids: Sequence[int]) -> list[int]:
        return list(token_ids)

    def chunk_end(self, first: int, last: int) -> int:  # noqa: ARG002
        return last

    def num_slots_to_begin(self, num_slots: int, chunk_end: int) -> int:
        return min(num_slots, chunk_end)

    def context(self, blocks: tuple[int, ...], first: int, num_tokens: int) -> RowContext:  # noqa: ARG002
        return RowContext(blocks, first)

    def parent(self, root: bytes, hashes: Sequence[bytes], block: int) -> bytes:
        return hashes[block - 1] if block else root


PLAIN_LAYOUT = PlainLayout()


@dataclass(frozen=True)
class Layout:
    """The places of segments in a cache of blocks. A slot is a place in the sequence, holes
    included."""

    segments: tuple[Segment, ...]
    block_size: int

    def __post_init__(self) -> None:
        assert self.segments
        assert SEGMENT_MULTIPLE % self.block_size == 0

    @cached_property
    def starts(self) -> list[int]:
        """The first slot of each segment."""
        return [0, *accumulate(padded(segment.num_tokens) for segment in self.segments[:-1])]

    @cached_property
    def num_holes(self) -> int:
        """The holes of all segments: the last one has none."""
        return self.starts[-1] - sum(segment.num_tokens for segment in self.segments[:-1])

    def at(self, slot: int) -> int:
        """The number of the segment of a slot."""
        return bisect_right(self.starts, slot) - 1

    def end(self, number: int) -> int:
        """The slot behind a segment's last token."""
        return self.starts[number] + self.segments[number].num_tokens

    def skip_holes(self, slot: int) -> int:
        """The slot, or the next one that is not a hole."""
        number = self.at(slot)
        is_hole = number < len(self.segments) - 1 and slot >= self.end(number)
        return self.starts[number + 1] if is_hole else slot

    def num_tokens_in(self, num_slots: int) -> int:
        """How many of the first num_slots slots are not holes."""
        number = self.at(num_slots)
        before = sum(segment.num_tokens for segment in self.segments[:number])
        own = num_slots - self.starts[number]
        return before + (own if number == len(self.segments) - 1 else min(own, self.segments[number].num_tokens))

    def pad(self, token_ids: Sequence[int]) -> list[int]:
        """The prompt's tokens, with holes."""
        slots: list[int] = []
        first = 0
        for number, segment in enumerate(self.segments):
            slots.extend([HOLE] * (self.starts[number] - len(slots)))
            slots.extend(token_ids[first : first + segment.num_tokens])
            first += segment.num_tokens
        return slots

    def all_blocks(self, number: int) -> range:
        """The blocks of a segment that is not the last, holes included."""
        return range(self.starts[number] // self.block_size, self.starts[number + 1] // self.block_size)

    def seen_blocks(self, number: int) -> list[int]:
        """The blocks, by their place in the sequence, of all that a segment sees."""
        return [block for each in self.segments[number].sees for block in self.all_blocks(each)]

    @cached_property
    def block_lens(self) -> list[int]:
        """How many slots of each block before the last segment are no holes."""
        size = self.block_size
        return [
            min(size, max(0, self.end(number) - block * size))
            for number in range(len(self.segments) - 1)
            for block in self.all_blocks(number)
        ]

    def chunk_end(self, first: int, last: int) -> int:
        """Where a chunk of the slots [first, last) must end: it has tokens of one segment."""
        return last if first >= self.starts[-1] else min(last, self.end(self.at(first)))

    def num_slots_to_begin(self, num_slots: int, chunk_end: int) -> int:  # noqa: ARG002
        """How many of a sequence's slots must have room in the cache before it begins, if its first chunk
        ends at `chunk_end`. With segments, all: later ones may be found in the cache, and are held from then
        on."""
        return num_slots

    def context(self, blocks: tuple[int, ...], first: int, num_tokens: int) -> RowContext:
        """The context of some tokens of one segment, from the slot `first` on: the blocks that the segment
        sees, then its own. blocks: of the sequence."""
        number, size = self.at(first), self.block_size
        start, end = self.starts[number], -(-(first + num_tokens) // size)
        own = blocks[start // size : end]
        if number == len(self.segments) - 1:  # it sees all
            seen, lens = blocks[: start // size], self.block_lens
        else:
            places = self.seen_blocks(number)
            seen, lens = tuple(blocks[place] for place in places), [self.block_lens[place] for place in places]
        num_seen = len(seen) * size
        return RowContext(
            blocks=(*seen, *own),
            num_tokens=num_seen + first - start,
            position_shift=self.segments[number].position - num_seen,
            block_lens=(*lens, *(size,) * len(own)),
        )

    def parent(self, root: bytes, hashes: Sequence[bytes], block: int) -> bytes:
        """The hash of what a block goes on from. hashes: of all blocks before it, at least."""
        number = self.at(block * self.block_size)
        if block * self.block_size != self.starts[number]:
            return hashes[block - 1]
        segment = self.segments[number]
        return segment_root(root, segment.position, [hashes[self.all_blocks(each)[-1]] for each in segment.sees])


def layout_of(segments: Sequence[Segment], block_size: int) -> Layout | PlainLayout:
    """The layout of a prompt with these segments, or with none."""
    return Layout(tuple(segments), block_size) if segments else PLAIN_LAYOUT


def length_of(segments: Sequence[Segment]) -> int:
    """The part of the longest sequence that a prompt takes: its slots, or its positions, if they
    reach further."""
    slots = sum(padded(segment.num_tokens) for segment in segments[:-1]) + segments[-1].num_tokens
    return max(slots, *(segment.position + segment.num_tokens for segment in segments))


def padded(num_tokens: int) -> int:
    """The slots of so many tokens that others follow."""
    return -(-num_tokens // SEGMENT_MULTIPLE) * SEGMENT_MULTIPLE


def segment_hashes(root: bytes, token_ids: Sequence[int], layout: Layout) -> list[bytes]:
    """The hashes of the whole blocks of these tokens, a prompt's first: prefix_hash.py's, of one with
    segments."""
    slots, hashes = layout.pad(token_ids), list[bytes]()
    for start in range(0, len(slots) - layout.block_size + 1, layout.block_size):
        hashes.append(block_hash(layout.parent(root, hashes, len(hashes)), slots[start : start + layout.block_size]))
    return hashes
