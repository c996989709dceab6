"""BlockManager: which sequence has which blocks of the KV cache. The tensors are kv_cache.py's.

A block is held by the sequences in whose tables it is (its reference count), or it is free. `grow` and
`adopt` take free blocks, `share`, `fork` and `reuse` hold blocks that are there, `free` gives back. A full
block whose KV is written is also offered to the prefix cache, under a hash of its tokens chained to
its parent's. It stays there when no sequence holds it any more, until its place is needed: such blocks
count as free, and are evicted in the order in which they were released. A block that is cached or held
twice is never written: a sequence that must write into one gets a copy (copy-on-write).

A prefix matches to the token: behind its last whole block, the cached block that goes on with the most
of its tokens is shared as far as they agree. So the block that a sequence ends in is cached, too,
though it is not full.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice, pairwise, takewhile

from services.compute.cache.state_slots import StateSlots
from services.compute.sequence import Sequence
from shared.model.prefix_hash import block_hash, prefix_root

MOST_CHILDREN = 64  # that are compared, of the blocks that follow one


class BlockManager:
    """A pool of num_blocks blocks of block_size tokens. Taking and giving back a block is O(1).

    Within one, and between those of equal fingerprints, blocks have one hash exactly if their tokens
    have the same keys and values, for sequences of one salt.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_caching: bool = True,
        fingerprint: str = "",
        slots: StateSlots | None = None,
    ) -> None:
        """fingerprint: of what computes the blocks, as prefix_root has it; slots: of a model that keeps states of
        its sequences, too. Each that begins has one; no two share any block."""
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching and slots is None
        self.slots = slots
        self.fingerprint = fingerprint
        # of the blocks that were ever taken; a model without keys and values may have millions that never are
        self.ref_counts: list[int] = []
        self.block_hashes: list[bytes | None] = []  # None: it is not in the prefix cache
        self.cached_blocks: dict[bytes, int] = {}
        # their parents' hashes and their tokens; and by the parent's hash those that follow it, the last to come last
        self.origins: dict[int, tuple[bytes, list[int]]] = {}
        self.children: dict[bytes, dict[int, None]] = {}
        # cached, held by no sequence; the least recently released first
        self.evictable: OrderedDict[int, None] = OrderedDict()
        self.empty: list[int] = []  # given back, in no prefix cache
        self.copies: dict[int, int] = {}  # to: from, for the next step
        # hashes and blocks that were offered to the prefix cache, for a second tier; None without one
        self.fresh: list[tuple[bytes, int]] | None = None
        # hashes that have come into the prefix cache or have left it, for tokenizers; None: not recorded
        self.changes: dict[bytes, bool] | None = None
        self.num_evictions = 0
        self._num_unheld = 0  # within `without`: those that only that sequence holds

    @property
    def begins_again(self) -> bool:
        """Whether a sequence that goes back is computed from its beginning: its state has no log."""
        return self.slots is not None and not self.slots.log_length

    @property
    def num_free_blocks(self) -> int:
        return self.num_blocks - len(self.ref_counts) + len(self.empty) + len(self.evictable) + self._num_unheld

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    @contextmanager
    def without(self, sequence: Sequence) -> Iterator[None]:
        """Count as if the sequence had given its blocks back. Nothing may be taken or given back meanwhile."""
        for block_id in sequence.kv.block_table:
            self.ref_counts[block_id] -= 1
        self._num_unheld = sum(self.ref_counts[block_id] == 0 for block_id in set(sequence.kv.block_table))
        try:
            yield
        finally:
            self._num_unheld = 0
            for block_id in sequence.kv.block_table:
                self.ref_counts[block_id] += 1

    def has_room_for(self, sequence: Sequence, matched: list[int], most_tokens: int) -> bool:
        """Whether there are free blocks for a sequence that begins with those in `matched`, with a first
        chunk of up to most_tokens tokens, or of an image that is computed whole."""
        chunk_end = len(matched) * self.block_size + max(most_tokens, sequence.request.largest_whole)
        num_slots = sequence.request.layout.num_slots_to_begin(len(sequence.tokens), chunk_end)
        return self.num_blocks_for(num_slots) - self.num_held(sequence, matched) <= self.num_free_blocks

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Let the sequence write up to its num_tokens-th slot: blocks for all, and its own copy of
        the first it writes into if that is shared.

        All or nothing. Returns whether there were enough free blocks.
        """
        num_tokens = sequence.request.layout.skip_holes(num_tokens)
        missing = self.num_blocks_for(num_tokens) - len(sequence.kv.block_table)
        tail = self._shared_tail(sequence) if sequence.kv.has_shared_tail else None
        if max(0, missing) + (tail is not None) > self.num_free_blocks:
            return False
        if tail is not None:
            shared = sequence.kv.block_table[tail]
            sequence.kv.block_table[tail] = own = self._take()
            self.copies[own] = self.copies.get(shared, shared)
            self._release(shared)
            sequence.kv.num_shared_blocks -= tail < sequence.kv.num_shared_blocks
        sequence.kv.has_shared_tail = False
        for _ in range(missing):
            sequence.kv.block_table.append(self._take())
        return True

    def free(self, sequence: Sequence) -> None:
        """Take all of the sequence's blocks back, the last first, so that its beginning stays cached for
        longest."""
        self._keep_tail(sequence)
        if self.slots is not None:
            self.slots.give_back(sequence)
        for block_id in reversed(sequence.kv.block_table):
            self._release(block_id)
        sequence.kv.clear()

    def match(self, sequence: Sequence) -> list[int]:
        """The cached blocks of the longest cached prefix of the sequence's reusable tokens."""
        return self._cached(chain.from_iterable(self._names(sequence))) if self.prefix_caching else []

    def reuse(self, sequence: Sequence) -> bool:
        """At the beginning of a segment that is not the first: go on behind its blocks that are
        cached. `match` sees only those before the first that is missing. Returns whether it did."""
        layout, first = sequence.request.layout, sequence.kv.num_computed
        if not self.prefix_caching or first == 0 or layout.starts[layout.at(first)] != first:
            return False
        place = first // self.block_size
        cached = self._cached(self._names(sequence)[layout.at(first)])
        num_unheld = sum(self.ref_counts[block_id] == 0 for block_id in cached)
        if not cached or place - len(sequence.kv.block_table) > self.num_free_blocks - num_unheld:
            return False
        for block_id in cached:
            self._hold(sequence, block_id)
        while len(sequence.kv.block_table) < place:  # blocks of holes alone
            sequence.kv.block_table.append(self._take())
        for block_id in sequence.kv.block_table[place : place + len(cached)]:
            self._release(block_id)
        sequence.kv.block_table[place : place + len(cached)] = cached
        sequence.kv.num_committed_blocks = place + len(cached)
        sequence.kv.num_computed = layout.skip_holes(sequence.kv.num_committed_blocks * self.block_size)
        return True

    def num_held(self, sequence: Sequence, matched: list[int]) -> int:
        """How many blocks a sequence that begins with those in `matched` will share with others that hold
        them now: of each later segment, those cached from its beginning on."""
        number = sequence.request.layout.at(len(matched) * self.block_size)
        later = [self._cached(names) for names in self._names(sequence)[number + 1 :]] if self.prefix_caching else []
        return sum(self.ref_counts[block_id] > 0 for block_ids in (matched, *later) for block_id in block_ids)

    def _names(self, sequence: Sequence) -> list[Iterator[bytes]]:
        """The hashes of the sequence's reusable blocks, by segment; without segments all are of one."""
        num_blocks = sequence.num_reusable_tokens // self.block_size
        borders = [*(min(start // self.block_size, num_blocks) for start in sequence.request.layout.starts), num_blocks]
        return [map(partial(self._hash, sequence), range(first, last)) for first, last in pairwise(borders)]

    def _cached(self, names: Iterable[bytes]) -> list[int]:
        """The cached blocks of these hashes, up to the first that is missing."""
        return [self.cached_blocks[name] for name in takewhile(self.cached_blocks.__contains__, names)]

    def match_end(self, sequence: Sequence, matched: list[int]) -> tuple[int, int] | None:
        """Behind the blocks that `match` returned: the cached block that begins with the most of the sequence's
        next reusable tokens, and their number. None if there is none."""
        start = len(matched) * self.block_size
        wanted = sequence.tokens.ids[start : min(sequence.num_reusable_tokens, start + self.block_size)]
        children = self.children.get(self._parent(sequence, len(matched)), {}) if self.prefix_caching and wanted else {}
        lengths = {
            block_id: common_length(self.origins[block_id][1], wanted)
            for block_id in islice(reversed(children), MOST_CHILDREN)
        }
        longest = max(lengths, key=lambda block_id: lengths[block_id], default=None)
        return (longest, lengths[longest]) if longest is not None and lengths[longest] else None

    def missing(self, sequence: Sequence) -> list[list[bytes]]:
        """For each segment of the sequence, the hashes of its reusable blocks that are not in the prefix
        cache; none twice. The cached ones count as used last, and there is room for the missing ones in
        addition to those."""
        by_segment = [list(names) for names in self._names(sequence)]
        known = {name for names in by_segment for name in names if name in self.cached_blocks}
        unheld = dict.fromkeys(self.cached_blocks[name] for names in by_segment for name in names if name in known)
        unheld = {block_id: None for block_id in unheld if self.ref_counts[block_id] == 0}
        for block_id in reversed(unheld):
            self.evictable.move_to_end(block_id)
        room, missing = self.num_free_blocks - len(unheld), list[list[bytes]]()
        for names in by_segment:
            own = [name for name in dict.fromkeys(names) if name not in known][: max(0, room)]
            known.update(own)
            room -= len(own)
            missing.append(own)
        return [own for own in missing if own]

    def adopt(self, sequence: Sequence, name: bytes) -> int:
        """A free block for the keys and values of one of the sequence's `missing` blocks, which come from the
        second tier. It is in the prefix cache from now on, and held by no sequence."""
        block_id = self._take()
        number = sequence.kv.block_hashes.index(name)
        self._offer(self._parent(sequence, number), self._tokens(sequence, number), name, block_id)
        self._release(block_id)
        return block_id

    def share(self, sequence: Sequence, block_ids: list[int], num_tokens: int) -> None:
        """Begin a sequence with blocks that hold its first num_tokens tokens already. The last of
        them may be full in part only."""
        assert not sequence.kv.block_table and num_tokens < len(sequence.tokens)
        if self.slots is not None:
            self.slots.take(sequence)
        for block_id in block_ids:
            self._hold(sequence, block_id)
        sequence.kv.block_table.extend(block_ids)
        # where another's longer block ends a segment here, the segment's own last block is never offered
        num_tokens = sequence.request.layout.skip_holes(num_tokens)
        sequence.kv.num_computed = num_tokens
        sequence.kv.num_committed_blocks = num_tokens // self.block_size
        sequence.kv.has_shared_tail = num_tokens % self.block_size != 0

    def common_blocks(self, parent: Sequence, child: Sequence) -> list[int]:
        """The parent's blocks that a fork keeps sharing: those before the one that the child writes
        first."""
        return parent.kv.block_table[: min(parent.tokens.num_prompt, len(child.tokens) - 1) // self.block_size]

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Begin a child with its parent's blocks, as far as the two have their tokens in common:
        the prompt, but for the token it needs logits of."""
        num_tokens = min(parent.tokens.num_prompt, len(child.tokens) - 1)
        assert parent.kv.num_computed >= num_tokens
        self.share(child, parent.kv.block_table[: self.num_blocks_for(num_tokens)], num_tokens)
        parent.kv.has_shared_tail = parent.kv.has_shared_tail or child.kv.has_shared_tail

    def commit(self, sequence: Sequence) -> None:
        """Offer the sequence's full blocks, whose tokens are decided and whose KV is written, to
        the prefix cache. Of two equal blocks the first stays."""
        num_full = min(sequence.kv.num_computed, sequence.tokens.num_decided) // self.block_size
        if not self.prefix_caching:
            return
        for number in range(sequence.kv.num_committed_blocks, num_full):
            name, block_id = self._hash(sequence, number), sequence.kv.block_table[number]
            if name not in self.cached_blocks:
                self._offer(self._parent(sequence, number), self._tokens(sequence, number), name, block_id)
                if self.fresh is not None:
                    self.fresh.append((name, block_id))
        sequence.kv.num_committed_blocks = num_full

    def forget_hashes(self, sequence: Sequence, num_tokens: int) -> None:
        """Only the sequence's first num_tokens are the same as before."""
        del sequence.kv.block_hashes[num_tokens // self.block_size :]

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """The copies (from, to) to be made before the next step."""
        copies = tuple((source, target) for target, source in self.copies.items())
        self.copies.clear()
        return copies

    def _hash(self, sequence: Sequence, number: int) -> bytes:
        """The hash of the sequence's number-th block: of its tokens, all before them, and its
        root."""
        hashes = sequence.kv.block_hashes
        while len(hashes) <= number:
            hashes.append(block_hash(self._parent(sequence, len(hashes)), self._tokens(sequence, len(hashes))))
        return hashes[number]

    def _parent(self, sequence: Sequence, number: int) -> bytes:
        """The hash that precedes the sequence's number-th block: of the block before it, or the root of the
        sequence, or of a segment."""
        if number:
            self._hash(sequence, number - 1)  # so that the hashes of all blocks before it are there
        root = prefix_root(self.fingerprint, salt=sequence.request.cache_salt)
        return sequence.request.layout.parent(root, sequence.kv.block_hashes, number)

    def _tokens(self, sequence: Sequence, number: int) -> list[int]:
        return sequence.tokens.ids[number * self.block_size : (number + 1) * self.block_size]

    def _keep_tail(self, sequence: Sequence) -> None:
        """Offer the last block of a sequence that gives its blocks back, which is not full, as far as its
        tokens are decided and computed: a sequence that goes on from there begins with it."""
        num_tokens = min(sequence.kv.num_computed, sequence.tokens.num_decided)
        number = num_tokens // self.block_size
        tokens = sequence.tokens.ids[number * self.block_size : num_tokens]
        if not self.prefix_caching or not tokens:
            return
        block_id, parent = sequence.kv.block_table[number], self._parent(sequence, number)
        is_own = self.ref_counts[block_id] == 1 and self.block_hashes[block_id] is None and block_id not in self.copies
        if is_own and (name := block_hash(parent, tokens)) not in self.cached_blocks:
            self._offer(parent, tokens, name, block_id)

    def _offer(self, parent: bytes, tokens: list[int], name: bytes, block_id: int) -> None:
        """Put a block of these tokens, behind that parent, into the prefix cache."""
        self.cached_blocks[name] = block_id
        self.block_hashes[block_id] = name
        self.origins[block_id] = parent, tokens
        self.children.setdefault(parent, {})[block_id] = None
        if self.changes is not None:
            self.changes[name] = True

    def _shared_tail(self, sequence: Sequence) -> int | None:
        """The place in the table of the block that the sequence would write next, if it must
        not."""
        number = sequence.kv.num_computed // self.block_size
        if number >= len(sequence.kv.block_table):
            return None
        block_id = sequence.kv.block_table[number]
        return number if self.ref_counts[block_id] > 1 or self.block_hashes[block_id] is not None else None

    def _hold(self, sequence: Sequence, block_id: int) -> None:
        """One more holder of a block that is there."""
        if self.ref_counts[block_id] == 0:
            del self.evictable[block_id]
        else:
            sequence.kv.num_shared_blocks += 1
        self.ref_counts[block_id] += 1

    def _take(self) -> int:
        if self.empty:
            block_id = self.empty.pop()
        elif len(self.ref_counts) < self.num_blocks:
            block_id = len(self.ref_counts)
            self.ref_counts.append(0)
            self.block_hashes.append(None)
        else:
            block_id, _ = self.evictable.popitem(last=False)
            evicted = self.block_hashes[block_id]
            assert evicted is not None
            del self.cached_blocks[evicted]
            self.block_hashes[block_id] = None
            parent, _ = self.origins.pop(block_id)
            del self.children[parent][block_id]
            if not self.children[parent]:
                del self.children[parent]
            self.num_evictions += 1
            if self.changes is not None:
                self.changes[evicted] = False
        self.ref_counts[block_id] = 1
        return block_id

    def _release(self, block_id: int) -> None:
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id]:
            return
        self.copies.pop(block_id, None)
        if self.block_hashes[block_id] is None:
            self.empty.append(block_id)
        else:
            self.evictable[block_id] = None


def common_length(some: list[int], others: list[int]) -> int:
    """How many first tokens two lists have in common."""
    return next(
        (at for at, (one, other) in enumerate(zip(some, others, strict=False)) if one != other),
        min(len(some), len(others)),
    )
