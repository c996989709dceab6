"""Drafts by an EAGLE-3 head (eagle_head.py): one after the other, each of the result of the last.

Keys and values of the head's layer stand in blocks with the target's ids. So a sequence that shares
its blocks, or finds them in the prefix cache, finds the head's with them; one that is preempted has
them computed again, as the target's are; and none is freed apart. A block into which the head has
not written, or not to its end, has other keys: guesses are worse for it, and nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from services.compute.backends.backend import RowSearch
from services.compute.cache.kv_cache import KVCache
from services.compute.execution.executor import Executor
from services.compute.sequence import Sequence
from services.compute.sequence.batch import BatchRow, ScheduledBatch
from services.compute.speculation.eagle_head import EagleChunk, EagleHead
from services.compute.speculation.medusa import AT_ONCE, guess
from services.compute.speculation.proposer import Drafts, Wanted

# that a chain stands, as the head has it, below which no more is drafted: a place more costs the
# head's run and a token of the step
MIN_CHANCE = 0.2
MAX_UNREAD = 16  # places of a sequence that wait for drafts to be wanted; more are read at once
# sequences whose states are kept: a chunk in flight may be of one that has just been forgotten
MAX_SEQUENCES = 1024


@dataclass(slots=True)
class Unread:
    """The tokens of a sequence that the target has computed last, and the head has not read yet."""

    first: int  # of the places, in the sequence
    block_table: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)  # at these places
    states: list[Tensor] = field(default_factory=list)  # there, [n, taps * hidden] each

    @property
    def end(self) -> int:
        """The place behind the last: the target computes it next."""
        return self.first + len(self.token_ids)

    def add(self, row: BatchRow, states: Tensor) -> None:
        self.block_table = row.block_table
        self.token_ids += row.token_ids[: len(states)]
        self.states.append(states)

    def drop(self, count: int) -> None:
        """The head has read the first places."""
        self.states = [torch.cat(self.states)[count:].clone()] if count < len(self.token_ids) else []
        self.token_ids = self.token_ids[count:]
        self.first += count


@dataclass(slots=True)
class Draft:
    """A chain on its way."""

    sequence: Sequence
    max_drafts: int
    token_ids: list[int] = field(default_factory=list)
    chance: float = 1.0  # that all stand, as the head has it
    is_over: bool = False

    def add(self, token_id: int, chance: float) -> None:
        self.chance *= chance
        ends = token_id in self.sequence.request.end_token_ids
        if ends or not self.chance >= MIN_CHANCE:
            self.is_over = True
            return
        self.token_ids.append(token_id)
        self.is_over = len(self.token_ids) == self.max_drafts


class EagleProposer:
    """A Proposer."""

    name = "eagle"
    needs_hidden = True
    runs_model = True
    stops_itself = True

    def __init__(self, head: EagleHead, kv_cache: KVCache, executor: Executor, row_search: RowSearch) -> None:
        """kv_cache: of the head's layer, with the target's blocks."""
        self.head = head
        self.kv_cache = kv_cache
        self.executor = executor
        self.row_search = row_search
        self._unread: dict[int, Unread] = {}  # by handle

    def computed(self, batch: ScheduledBatch, hidden: Any, decided: Mapping[int, int]) -> None:
        if batch.block_copies:
            self.kv_cache.copy_blocks(batch.block_copies)
        parts: list[tuple[BatchRow, int]] = []  # and how many tokens of the row stand
        places: list[int] = []
        at = 0  # of the batch's tokens
        for row in batch.rows:
            if row.sampled:
                count = decided.get(row.handle, 0)
                num_standing = row.sampled[count - 1] + 1 if count else 0
            else:
                num_standing = 0 if row.pooled else row.num_tokens
            if num_standing:
                parts.append((row, num_standing))
                places.extend(range(at, at + num_standing))
            at += row.num_tokens
        if parts:
            found = torch.split(self.executor.tapped_states(batch, hidden, places), [count for _, count in parts])
            for (row, _), states in zip(parts, found, strict=True):
                self._hear(row, states)
            many = [
                unread
                for row, _ in parts
                if (unread := self._unread.get(row.handle)) and len(unread.token_ids) > MAX_UNREAD
            ]
            for at in range(0, len(many), AT_ONCE):
                self._read(many[at : at + AT_ONCE])

    def propose(self, wanted: Mapping[int, Wanted]) -> dict[int, Drafts]:
        known = [
            each
            for handle, each in wanted.items()
            if (unread := self._unread.get(handle)) and self._is_next(unread, each.sequence)
        ]
        drafts: dict[int, Drafts] = {}
        for at in range(0, len(known), AT_ONCE):
            drafts |= self._propose(known[at : at + AT_ONCE])
        return drafts

    def forget(self, handle: int) -> None:
        self._unread.pop(handle, None)

    def _is_next(self, unread: Unread, sequence: Sequence) -> bool:
        return bool(unread.token_ids) and unread.end == len(sequence.tokens) - 1

    def _hear(self, row: BatchRow, states: Tensor) -> None:
        """states: of the row's first tokens, those that stand."""
        if row.block_lens or row.images:
            return  # its places are those of a segment's blocks; or it has tokens that the head can't read
        unread = self._unread.pop(row.handle, None)
        if unread is None or unread.end != row.num_computed_tokens:  # it is new, or computed again
            unread = Unread(row.num_computed_tokens, row.block_table)
        unread.add(row, states.clone())
        self._unread[row.handle] = unread  # the last, now
        if len(self._unread) > MAX_SEQUENCES:
            del self._unread[next(iter(self._unread))]

    def _read(self, some: list[Unread]) -> None:
        """Write keys and values of all places whose next token is known: all but the last."""
        places = [EagleChunk(each.first, each.token_ids[1:], each.block_table) for each in some]
        states = self.head.fuse(torch.cat([torch.cat(each.states)[:-1] for each in some]))
        self.head.write(places, states, self.kv_cache.layers[0], self.kv_cache.block_size)
        for each in some:
            each.drop(len(each.token_ids) - 1)

    def _propose(self, wanted: list[Wanted]) -> dict[int, Drafts]:
        chains = [Draft(each.sequence, each.max_drafts) for each in wanted]
        unread = [self._unread[each.sequence.handle] for each in wanted]
        states = self.head.fuse(torch.cat([state for each in unread for state in each.states]))
        places = [
            EagleChunk(each.first, [*each.token_ids[1:], chain.sequence.tokens.ids[-1]], chain.sequence.kv.block_table)
            for each, chain in zip(unread, chains, strict=True)
        ]
        for each in unread:
            each.drop(len(each.token_ids))
        going = chains
        while going:
            results = self._run(places, states)
            self._draw(going, results)
            is_going = [number for number, chain in enumerate(going) if not chain.is_over]
            going, places = [going[number] for number in is_going], [places[number] for number in is_going]
            places = [
                EagleChunk(each.first + len(each.token_ids), chain.token_ids[-1:], each.block_table)
                for each, chain in zip(places, going, strict=True)
            ]
            states = self.head.next_states(results[is_going])
        return {chain.sequence.handle: Drafts(chain.token_ids) for chain in chains if chain.token_ids}

    def _run(self, places: list[EagleChunk], states: Tensor) -> Tensor:
        """The results at the last place of each sequence."""
        results = self.head.run(places, states, self.kv_cache.layers[0], self.kv_cache.block_size)
        ends = torch.tensor([len(place.token_ids) for place in places]).cumsum(0) - 1
        return results[ends.to(results.device)]

    def _draw(self, chains: list[Draft], results: Tensor) -> None:
        """Append a draft to each of the chains that go on."""
        positions = [chain.sequence.next_position + len(chain.token_ids) for chain in chains]
        params = [chain.sequence.request.params for chain in chains]
        guessed = guess(self.head.logits(results), params, positions, self.head.token_ids, self.row_search)
        for chain, token_id, chance in zip(chains, guessed.token_ids.tolist(), guessed.chances.tolist(), strict=True):
            chain.add(token_id, chance)
