"""The scheduler and the block manager under random arrivals, lengths, cancels, forks and decisions,
for all strategies: the invariants hold after every step.

Decisions are taken within the step, or come later: then sequences run ahead of them, and what was
foreseen may come otherwise. A model of the cache's content runs along: what is written where. So a
block that is shared, evicted or copied wrongly is seen as a wrong token.
"""

import hashlib
import random
from array import array
from collections import Counter
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.compute.cache.block_manager import BlockManager
from services.compute.scheduling.admission import STRATEGIES, Predicted
from services.compute.scheduling.new_step import NewStep
from services.compute.scheduling.offline import run_step
from services.compute.scheduling.policy import StepPolicy
from services.compute.scheduling.scheduler import Begin, Scheduler
from services.compute.sequence import ScoredTokens, Sequence
from services.compute.sequence.batch import BatchRow, ScheduledBatch
from shared.model.prefix_hash import prefix_root
from shared.model.segments import HOLE, Layout, PlainLayout, Segment
from tests.examples import examples
from tests.unit.sequences import BLOCK_SIZE, MAX_SEQS, MAX_TOKENS, counted, make_scheduler, make_sequence

# What becomes of a foreseen token: it is decided; another is; it is, and ends the sequence; it is,
# and does not end it; the sequence ends without it.
OUTCOMES = ("as foreseen", "otherwise", "the end", "not the end", "lost")


class WatchedBlocks(BlockManager):
    """Remembers which blocks were taken again for a step."""

    def __init__(self, num_blocks: int, *, prefix_caching: bool) -> None:
        super().__init__(num_blocks, BLOCK_SIZE, prefix_caching=prefix_caching)
        self.taken: set[int] = set()

    def _take(self) -> int:
        block_id = super()._take()
        self.taken.add(block_id)
        return block_id


class WatchedScheduler(Scheduler):
    """Sees to it that no place is taken from a sequence for one that does not begin."""

    num_begun = 0

    def _begin(self, sequence: Sequence, verdict: Begin, step: NewStep, budget: int) -> int:
        self.num_begun += 1
        return super()._begin(sequence, verdict, step, budget)

    def _admit(self, step: NewStep, budget: int) -> None:
        num_begun, num_preemptions = self.num_begun, self.num_preemptions
        super()._admit(step, budget)
        assert self.num_preemptions - num_preemptions <= self.num_begun - num_begun


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        strategy=st.sampled_from(STRATEGIES),
        prefix_caching=st.booleans(),
        target_itl_s=st.sampled_from([None, 0.001, 0.02]),
        num_blocks=st.integers(24, 60),
        run_ahead=st.sampled_from([None, 0, 1, 2, 3]),
        seed=st.integers(0, 99),
        has_tier=st.booleans(),
        num_places=st.sampled_from([2, MAX_SEQS]),
    )
    def start(
        self,
        strategy: str,
        prefix_caching: bool,
        target_itl_s: float | None,
        num_blocks: int,
        run_ahead: int | None,
        seed: int,
        has_tier: bool,
        num_places: int,
    ) -> None:
        self.blocks = WatchedBlocks(num_blocks, prefix_caching=prefix_caching)
        self.scheduler = make_scheduler(
            strategy,
            blocks=self.blocks,
            kind=WatchedScheduler,
            target_itl_s=target_itl_s,
            run_ahead=run_ahead or 0,
            max_num_seqs=num_places,
        )
        self.blocks.fresh = [] if has_tier else None
        self.policy = StepPolicy(awaits_restoring=has_tier)
        self.disk: dict[bytes, list[Any]] = {}  # the second tier: what the cache held of a block
        self.is_inline = run_ahead is None  # decisions are taken within the step
        self.rng = random.Random(seed)  # of the decisions in the end, when there are no more rules
        self.sequences: list[Sequence] = []
        self.voices: dict[int, int] = {}  # sequences of one voice and one prompt have one answer
        self.answers: dict[int, int] = {}  # output tokens that each is foreseen to come to
        self.log: dict[int, list[int]] = {}  # the decided tokens
        self.content: dict[int, tuple[Any, ...]] = {}  # by slot: the token whose KV is there, and all before it

    @rule(
        start=st.sampled_from([0, 0, 0, 50, 90]),
        length=st.sampled_from([5, 10]) | st.integers(1, 60),
        output=st.integers(1, 36),
        share=st.sampled_from([1.0, 0.5, 0.1]),
        priority=st.integers(-1, 1),
        salt=st.sampled_from(["", "", "s"]),
        has_own_voice=st.booleans(),
        prompt_logprobs=st.sampled_from([None, None, 0]),
        tenant_id=st.sampled_from(["", "a", "b"]),
    )
    def arrive(
        self,
        start: int,
        length: int,
        output: int,
        share: float,
        priority: int,
        salt: str,
        has_own_voice: bool,
        prompt_logprobs: int | None,
        tenant_id: str,
    ) -> None:
        """Prompts are runs of the natural numbers from one of three starts: many have prefixes in common."""
        voice = len(self.sequences) if has_own_voice else 0
        self.add(
            list(range(start, start + length)),
            output,
            share,
            voice,
            priority=priority,
            cache_salt=salt,
            prompt_logprobs=prompt_logprobs,
            tenant_id=tenant_id,
        )

    @rule(lengths=st.lists(st.integers(1, 60), min_size=2, max_size=MAX_SEQS), length=st.integers(20, 60))
    def arrive_in_a_hurry(self, lengths: list[int], length: int) -> None:
        """A long prompt that has priority over some that have begun: one may have to give its place to it."""
        for number, each in enumerate(lengths):
            self.add(list(range(700 + 100 * number, 700 + 100 * number + each)), 20, 1.0, 0, priority=5)
        for _ in range(sum(lengths) // MAX_TOKENS + 1):
            self.run_step()
        self.add(list(range(500, 500 + length)), 4, 1.0, 0, priority=-3, tenant_id=f"c{len(self.sequences)}")

    @rule(which=st.integers(0, 1 << 20), output=st.integers(1, 36))
    @precondition(lambda self: self.sequences)
    def arrive_again(self, which: int, output: int) -> None:
        """The same question: its answer, as far as it goes, will be the same."""
        earlier = self.sequences[which % len(self.sequences)]
        prompt = earlier.tokens.ids[: earlier.tokens.num_prompt]
        if self.blocks.num_blocks_for(len(prompt) + output) <= self.blocks.num_blocks:
            self.add(
                prompt,
                output,
                1.0,
                self.voices[earlier.handle],
                cache_salt=earlier.request.cache_salt,
                layout=earlier.request.layout,
            )

    @rule(
        length=st.integers(1, 40),
        output=st.integers(1, 20),
        n=st.integers(2, 4),
        share=st.floats(0.1, 1.0),
        has_own_voice=st.booleans(),
        wanted=st.lists(st.sampled_from([None, 0]), min_size=4, max_size=4),
    )
    def arrive_in_a_group(
        self, length: int, output: int, n: int, share: float, has_own_voice: bool, wanted: list[int | None]
    ) -> None:
        """Members that were claimed with a token in their logs ask for no logprobs of the prompt any more."""
        for prompt_logprobs in wanted[:n]:
            voice = len(self.sequences) if has_own_voice else 0
            group_id = f"group {len(self.sequences) // 4}-{length}"
            self.add(list(range(length)), output, share, voice, group_id=group_id, prompt_logprobs=prompt_logprobs)

    @rule(
        trunk=st.integers(1, 14),
        modules=st.lists(st.integers(0, 2), min_size=1, max_size=3),
        rest=st.integers(1, 10),
        output=st.integers(1, 12),
        shift=st.sampled_from([0, 7]),
        is_nested=st.booleans(),
        salt=st.sampled_from(["", "s"]),
        group=st.booleans(),
    )
    def arrive_in_segments(
        self,
        trunk: int,
        modules: list[int],
        rest: int,
        output: int,
        shift: int,
        is_nested: bool,
        salt: str,
        group: bool,
    ) -> None:
        """Modules with places of their own, in any order, which see the trunk, and perhaps the
        modules before. One may be there twice.
        """
        texts = [
            list(range(trunk)),
            *[list(range(200 + 100 * each, 200 + 100 * each + (5, 13, 16)[each])) for each in modules],
            list(range(rest)),
        ]
        places = [0, *[trunk + 20 * each + shift for each in modules], trunk + 100]
        segments = tuple(
            Segment(len(text), place, tuple(range(number)) if is_nested or number == len(texts) - 1 else (0,)[:number])
            for number, (text, place) in enumerate(zip(texts, places, strict=True))
        )
        layout = Layout(segments, BLOCK_SIZE)
        group_id = f"segments {len(self.sequences)}" if group else None
        for _ in range(2 if group else 1):
            self.add(layout.pad(sum(texts, [])), output, 1.0, 0, cache_salt=salt, group_id=group_id, layout=layout)

    def add(self, prompt: list[int], output: int, share: float, voice: int, **fields: Any) -> None:
        handle = len(self.sequences)
        sequence = make_sequence(handle, prompt, output, arrived_at=float(handle), **fields)
        self.sequences.append(sequence)
        self.voices[handle], self.answers[handle], self.log[handle] = voice, max(1, int(output * share)), []
        self.scheduler.add(sequence)

    @rule(which=st.integers(0, 1 << 20))
    def cancel(self, which: int) -> None:
        alive = [sequence for sequence in self.sequences if not sequence.is_finished]
        if alive:
            self.scheduler.finish(alive[which % len(alive)])

    @rule(which=st.integers(0, 1 << 20))
    def give_way(self, which: int) -> None:
        """Somebody is preempted, as if memory had run out: rather who is far ahead of its decisions."""
        running = sorted(self.scheduler.running.values(), key=lambda each: -each.tokens.num_undecided)
        if len(running) > 1:
            self.scheduler._preempt(running[which % len(running) if which % 2 else 0], NewStep())

    @rule(apart=st.just(frozenset[int]()) | st.frozensets(st.integers(0, 12), max_size=4))
    def set_apart(self, apart: frozenset[int]) -> None:
        self.policy = replace(self.policy, apart=apart)

    @rule(decisions=st.lists(st.tuples(st.integers(0, MAX_SEQS), st.sampled_from(OUTCOMES)), min_size=1, max_size=6))
    def step(self, decisions: list[tuple[int, str]]) -> None:
        """Some steps, and after each so many decisions as foreseen, then one of any kind."""
        for number, outcome in decisions:
            self.run_step()
            for sequence in self.undecided()[:number]:
                self.decide(sequence, "as foreseen")
            if undecided := self.undecided():
                self.decide(undecided[number % len(undecided)], outcome)

    def run_step(self) -> bool:
        self.cached_before = list(self.blocks.block_hashes)
        self.blocks.taken.clear()
        while not (is_restored := self.restore()):
            if self.rng.random() < 0.5:
                break  # the step goes on without it
        batch = (
            run_step(self.scheduler, self.execute, is_over=self.is_over, policy=self.policy)
            if self.is_inline
            else self.scheduler.schedule(self.policy)
        )
        if batch is None:
            assert not is_restored or self.undecided() or not self.scheduler.num_unfinished
            return False
        if not self.is_inline:
            sequences = [self.scheduler.get(handle) for handle, _ in batch.sampled]
            for sequence, token_id in zip(sequences, self.execute(batch, sequences), strict=True):
                sequence.tokens.foresee(token_id)
                if sequence.tokens.num_output in (self.answers[sequence.handle], sequence.request.params.max_tokens):
                    sequence.tokens.end()
        self.scheduler.step_cost.observe(batch.num_tokens, batch.num_context_tokens, 0.001 + 0.0005 * batch.num_tokens)
        return True

    def restore(self) -> bool:
        """As KVTier does, two blocks at a time. Returns whether all that may begin is restored."""
        for sequence in self.scheduler.next_to_begin(self.policy) if self.policy.awaits_restoring else []:
            if not sequence.kv.is_restored:
                runs = [list(takewhile(self.disk.__contains__, names))[:2] for names in self.blocks.missing(sequence)]
                found = next((run for run in runs if run), [])
                sequence.kv.is_restored = not found
                for name in found:
                    block_id = self.blocks.adopt(sequence, name)
                    self.content.update({block_id * BLOCK_SIZE + at: value for at, value in enumerate(self.disk[name])})
                if found:
                    return False
        return True

    def save(self) -> None:
        for name, block_id in self.blocks.fresh or []:
            if self.blocks.block_hashes[block_id] == name:
                self.disk[name] = [self.content.get(block_id * BLOCK_SIZE + at, ()) for at in range(BLOCK_SIZE)]
        if self.blocks.fresh is not None:
            self.blocks.fresh.clear()

    def execute(self, batch: ScheduledBatch, sampled: list[Sequence]) -> list[int]:
        """Returns the next token of each sampled sequence: it depends on its voice and position."""
        self.check_batch(batch)
        self.compute(batch)
        self.save()
        self.score(batch)
        for sequence in sampled:
            if sequence.handle % 2:  # has penalties
                self.check_counts(sequence)
        return [1000 + 10 * self.voices[sequence.handle] + sequence.next_position % 3 for sequence in sampled]

    def is_over(self, sequence: Sequence) -> bool:
        self.log[sequence.handle].append(sequence.tokens.ids[-1])
        return sequence.tokens.num_output == self.answers[sequence.handle]

    def undecided(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.tokens.num_undecided and not sequence.is_finished]

    def decide(self, sequence: Sequence, outcome: str) -> None:
        """The log holds the first undecided token now, or the sequence's end without it."""
        at = sequence.tokens.num_decided
        position, foreseen = at - sequence.tokens.num_prompt + 1, sequence.tokens.ids[at]
        if outcome == "lost":
            self.scheduler.truncate(sequence, at)
            return self.scheduler.finish(sequence)
        if outcome == "otherwise":
            self.scheduler.truncate(sequence, at)
            self.scheduler.append(sequence, 3000 + position % 2)
        else:
            self.scheduler.confirm(sequence)
            assert sequence.tokens.ids[at] == foreseen
        self.log[sequence.handle].append(sequence.tokens.ids[at])
        is_foreseen_end = outcome == "as foreseen" and position == self.answers[sequence.handle]
        if outcome == "the end" or is_foreseen_end or position == sequence.request.params.max_tokens:
            self.scheduler.truncate(sequence, at + 1)
            self.scheduler.finish(sequence, is_complete=True)

    def check_batch(self, batch: ScheduledBatch) -> None:
        handles = [row.handle for row in batch.rows]
        assert len(set(handles)) == len(handles) <= MAX_SEQS
        assert not self.policy.apart & {*handles} or {*handles} <= self.policy.apart
        assert 0 < batch.num_tokens <= MAX_TOKENS
        assert [key.handle for key in batch.sampled] == [row.handle for row in batch.rows if row.sampled]
        assert all(key.position == self.scheduler.running[key.handle].next_position for key in batch.sampled)
        assert all(row.num_tokens == 1 for row in batch.rows[: batch.num_decodes])
        assert all(row.sampled for row in batch.rows[: batch.num_decodes])
        for row in batch.rows:
            sequence = self.scheduler.running[row.handle]
            assert not sequence.tokens.is_ending and sequence.tokens.num_undecided <= self.scheduler.run_ahead
            assert row.num_tokens > 0 and sequence.kv.num_computed <= len(sequence.tokens)
            slots = self.slots_of(row)
            assert row.num_context_tokens == len(slots)
            assert row.token_ids == tuple(sequence.tokens.ids[slot] for slot in slots[row.num_computed_tokens :])
            blocks = [sequence.kv.block_table[slot // BLOCK_SIZE] for slot in slots[::BLOCK_SIZE]]
            assert list(row.block_table[: len(blocks)]) == blocks
            assert list(row.sampled) == [row.num_tokens - 1] * (slots[-1] == len(sequence.tokens) - 1)
            if not sequence.request.layout.segments:
                assert (row.position_shift, row.block_lens, slots[-1] + 1) == (0, (), sequence.kv.num_computed)
            else:
                segment = sequence.request.layout.segments[sequence.request.layout.at(slots[-1])]
                start = sequence.request.layout.starts[sequence.request.layout.at(slots[-1])]
                assert (
                    row.num_computed_tokens + row.position_shift
                    == segment.position + slots[row.num_computed_tokens] - start
                )
                seen = [
                    at
                    for block, length in enumerate(row.block_lens)
                    for at in range(block * BLOCK_SIZE, block * BLOCK_SIZE + length)
                ]
                assert [at for at in seen if at < len(slots)] == [
                    at for at, slot in enumerate(slots) if sequence.tokens.ids[slot] != HOLE
                ]

    def compute(self, batch: ScheduledBatch) -> None:
        """The model's work on the cache: copies, then writes. A token's KV depends on all tokens
        before it, and on the salt.
        """
        read = [
            [self.content.get(source * BLOCK_SIZE + at) for at in range(BLOCK_SIZE)] for source, _ in batch.block_copies
        ]
        targets = [target for _, target in batch.block_copies]
        assert len(set(targets)) == len(targets)
        assert all(source not in targets[:number] for number, (source, _) in enumerate(batch.block_copies)), (
            "reads what a copy before it has written"
        )
        for (_, target), values in zip(batch.block_copies, read, strict=True):
            self.content.update(
                {target * BLOCK_SIZE + at: value for at, value in enumerate(values) if value is not None}
            )
        written = set()
        for row in batch.rows:
            for at, token_id in enumerate(row.token_ids):
                position = row.num_computed_tokens + at
                block_id = row.block_table[position // BLOCK_SIZE]
                assert self.blocks.ref_counts[block_id] == 1, "writes into a block that another holds"
                assert block_id in self.blocks.taken or self.cached_before[block_id] is None, (
                    "writes into a cached block"
                )
                slot = block_id * BLOCK_SIZE + position % BLOCK_SIZE
                assert slot not in written
                written.add(slot)
                self.content[slot] = self.prefix(row.handle, self.slots_of(row)[position] + 1)
                assert self.content[slot][-1] == token_id
        for row in batch.rows:
            token_ids = self.sequences[row.handle].tokens.ids
            for position, place in enumerate(self.slots_of(row)):  # what its attention reads
                slot = row.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                assert token_ids[place] == HOLE or self.content[slot] == self.prefix(row.handle, place + 1)

    def slots_of(self, row: BatchRow) -> list[int]:
        """The slots of the sequence that the row's attention reads."""
        sequence = self.sequences[row.handle]
        layout = sequence.request.layout
        if not layout.segments:
            return list(range(row.num_context_tokens))
        number = layout.at(sequence.kv.num_computed - 1)
        seen = [
            slot
            for each in layout.segments[number].sees
            for slot in range(layout.starts[each], layout.starts[each + 1])
        ]
        slots = [*seen, *range(layout.starts[number], len(sequence.tokens))]
        return slots[: row.num_context_tokens]

    def score(self, batch: ScheduledBatch) -> None:
        """Each token of a prompt that asks for its logprobs is scored once, from the row before it;
        who gets its first token has them all.
        """
        for row in batch.rows:
            sequence, none = self.scheduler.running[row.handle], np.zeros((0, 0))
            if row.target_ids:
                last = row.first_target + len(row.target_ids) - 1
                assert (
                    row.num_computed_tokens
                    < row.first_target
                    <= last
                    <= min(row.num_context_tokens, sequence.tokens.num_prompt - 1)
                )
                sequence.scored.append(ScoredTokens(np.array(row.target_ids), none, none, none))
            if row.sampled and sequence.request.params.prompt_logprobs is not None:
                scored = [token_id for each in sequence.scored for token_id in each.logprobs.tolist()]
                assert scored == sequence.tokens.ids[1 : sequence.tokens.num_prompt]

    def prefix(self, handle: int, num_tokens: int) -> tuple[Any, ...]:
        """All that the last of these tokens depends on. For a segment: what it sees, where it stands, and its own."""
        sequence = self.sequences[handle]
        layout = sequence.request.layout
        if isinstance(layout, PlainLayout) or num_tokens <= layout.end(0):
            return (sequence.request.cache_salt, *islice(sequence.tokens.ids, num_tokens))
        number = layout.at(num_tokens - 1)
        seen = tuple(self.prefix(handle, layout.end(each)) for each in layout.segments[number].sees)
        return (
            sequence.request.cache_salt,
            Seen(seen, layout.segments[number].position),
            *sequence.tokens.ids[layout.starts[number] : num_tokens],
        )

    @invariant()
    def every_block_is_counted_once_for_each_holder(self) -> None:
        held = [block_id for sequence in self.sequences for block_id in sequence.kv.block_table]
        assert self.blocks.ref_counts == [held.count(block_id) for block_id in range(len(self.blocks.ref_counts))]
        free = [*self.blocks.empty, *self.blocks.evictable]
        assert sorted([*set(held), *free]) == list(range(len(self.blocks.ref_counts)))
        assert len(self.blocks.ref_counts) <= self.blocks.num_blocks
        assert not self.blocks.copies

    @invariant()
    def the_prefix_cache_names_what_is_there(self) -> None:
        cached = {
            block_id: block_hash
            for block_id, block_hash in enumerate(self.blocks.block_hashes)
            if block_hash is not None
        }
        assert {block_hash: block_id for block_id, block_hash in cached.items()} == self.blocks.cached_blocks
        assert set(self.blocks.evictable) == {block_id for block_id in cached if self.blocks.ref_counts[block_id] == 0}

    @invariant()
    def what_follows_a_block_is_known(self) -> None:
        assert (
            {each for children in self.blocks.children.values() for each in children}
            == set(self.blocks.cached_blocks.values())
            == set(self.blocks.origins)
        )
        for parent, children in self.blocks.children.items():
            assert children and all(self.blocks.origins[each][0] == parent for each in children)
            for each in children:
                tokens = self.blocks.origins[each][1]
                there = [token_id for token_id in tokens if token_id != HOLE]
                assert (
                    there == [self.content[each * BLOCK_SIZE + at][-1] for at in range(len(there))]
                    and 0 < len(tokens) <= BLOCK_SIZE
                )

    @invariant()
    def only_decided_tokens_are_in_the_prefix_cache(self) -> None:
        decided = {path for each in self.sequences for path in self.decided_of(each)}
        for block_hash, block_id in self.blocks.cached_blocks.items():
            length = sum(token_id != HOLE for token_id in self.blocks.origins[block_id][1])
            if not length:
                continue
            first, last = self.content[block_id * BLOCK_SIZE], self.content[block_id * BLOCK_SIZE + length - 1]
            assert len(last) == len(first) + length - 1 and last[: len(first)] == first
            assert chained_hash((*last, *[HOLE] * (len(self.blocks.origins[block_id][1]) - length))) == block_hash
            assert any(tokens[: len(last)] == last for tokens in decided), "nobody's log says so"

    def decided_of(self, sequence: Sequence) -> list[tuple[Any, ...]]:
        """All that the last decided token of each of its segments depends on."""
        layout = sequence.request.layout
        ends = [layout.end(number) for number in range(len(layout.segments) - 1)] if isinstance(layout, Layout) else []
        return [
            *(self.prefix(sequence.handle, end) for end in ends),
            (*self.prefix(sequence.handle, sequence.tokens.num_prompt), *self.log[sequence.handle]),
        ]

    @invariant()
    def only_running_sequences_hold_blocks(self) -> None:
        for sequence in self.sequences:
            is_running, is_waiting = sequence.handle in self.scheduler.running, sequence in self.scheduler.waiting
            assert is_running or not sequence.kv.block_table
            assert is_running + is_waiting + sequence.is_finished == 1
            assert (
                sequence.request.layout.segments
                or len(sequence.kv.block_table) * BLOCK_SIZE >= sequence.kv.num_computed
            )

    @invariant()
    def nobody_is_further_ahead_of_the_log_than_it_may_be(self) -> None:
        for sequence in self.sequences:
            assert 0 <= sequence.tokens.num_undecided <= (0 if self.is_inline else self.scheduler.run_ahead + 1)
            assert sequence.tokens.num_output <= (sequence.request.params.max_tokens or 0)
            if not sequence.is_finished:
                assert (
                    sequence.tokens.ids[sequence.tokens.num_prompt : sequence.tokens.num_decided]
                    == self.log[sequence.handle]
                )

    @invariant()
    def the_places_of_each_tenant_are_counted(self) -> None:
        assert dict(self.scheduler._num_running) == dict(
            Counter(each.request.tenant_id for each in self.scheduler.running.values())
        )

    def check_counts(self, sequence: Sequence) -> None:
        for num_tokens in (sequence.tokens.num_decided, len(sequence.tokens)):  # what is foreseen may be left out
            assert counted(sequence.tokens.output_counts(num_tokens)) == Counter(
                sequence.tokens.ids[sequence.tokens.num_prompt : num_tokens]
            )
            there = [token_id for token_id in sequence.tokens.ids[:num_tokens] if token_id != HOLE]
            assert counted(sequence.tokens.seen_counts(num_tokens)) == Counter(there)
            assert sequence.history(num_tokens).tolist() == there

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.policy = replace(self.policy, apart=frozenset())
        for _ in range(10_000):
            has_run = self.run_step()
            for sequence in self.undecided():
                if self.rng.random() < 0.7:
                    self.decide(sequence, self.rng.choices(OUTCOMES, weights=(12, 1, 1, 1, 1))[0])
            if not has_run and not self.scheduler.num_unfinished:
                break
        assert all(sequence.is_finished for sequence in self.sequences)
        assert self.blocks.num_free_blocks == self.blocks.num_blocks
        for sequence in self.sequences:
            self.check_counts(sequence)
        if not isinstance(self.scheduler.admission, Predicted):
            return
        peaks = self.scheduler.admission.peaks
        assert peaks is not None and 0 <= peaks.num_exceeded <= peaks.num_predictions


@dataclass(frozen=True)
class Seen:
    """All that a segment sees, and where it stands."""

    segments: tuple[tuple[Any, ...], ...]
    position: int


def padded_hash(content: tuple[Any, ...]) -> bytes:
    """The hash of a segment's last block, with the holes behind it."""
    num_tokens = sum(not isinstance(each, Seen) for each in content[1:])
    return chained_hash((*content, *[HOLE] * (-num_tokens % 16)))


def chained_hash(content: tuple[Any, ...]) -> bytes:
    """The hash under which the block with this last token is to be cached: its tokens, all before
    them, and the salt.
    """
    salt, *tokens = content
    found = prefix_root("", salt=salt)
    if tokens and isinstance(tokens[0], Seen):
        seen = b"".join([found, tokens[0].position.to_bytes(8, "little"), *map(padded_hash, tokens[0].segments)])
        found = hashlib.blake2b(seen, digest_size=16, person=b"segment").digest()
        del tokens[0]
    for start in range(0, len(tokens), BLOCK_SIZE):
        found = hashlib.blake2b(
            found + array("q", tokens[start : start + BLOCK_SIZE]).tobytes(), digest_size=16
        ).digest()
    return found


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = examples(120, stateful_step_count=40)
