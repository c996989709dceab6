"""The scheduler and the block manager under random arrivals, lengths, cancels and forks, for all strategies: the invariants hold after every step.

A model of the cache's content runs along: what is written where. So a block that is shared, evicted or copied wrongly is seen as a wrong token.
"""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from services.compute.batch import ScheduledBatch
from services.compute.cache.block_manager import BlockManager
from services.compute.scheduling.admission import STRATEGIES, Predicted, make_admission
from services.compute.scheduling.scheduler import Scheduler
from services.compute.sequence import Sequence
from shared.sampling_params import SamplingParams

NUM_BLOCKS, BLOCK_SIZE, MAX_SEQS, MAX_TOKENS = 24, 4, 5, 12


def make_scheduler(strategy: str = "predicted", *, num_blocks: int = NUM_BLOCKS, prefix_caching: bool = True, **limits: Any) -> Scheduler:
    blocks = BlockManager(num_blocks, BLOCK_SIZE, prefix_caching=prefix_caching)
    return Scheduler(blocks, make_admission(strategy, blocks), **{"max_num_seqs": MAX_SEQS, "max_batched_tokens": MAX_TOKENS, **limits})


def make_sequence(handle: int, prompt: list[int], max_tokens: int, **fields: Any) -> Sequence:
    return Sequence(handle, str(handle), list(prompt), len(prompt), SamplingParams(max_tokens=max_tokens), **fields)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        strategy=st.sampled_from(STRATEGIES),
        prefix_caching=st.booleans(),
        target_itl_s=st.sampled_from([None, 0.001, 0.02]),
        num_blocks=st.integers(24, 60),
    )
    def start(self, strategy: str, prefix_caching: bool, target_itl_s: float | None, num_blocks: int) -> None:
        self.scheduler = make_scheduler(strategy, num_blocks=num_blocks, prefix_caching=prefix_caching, target_itl_s=target_itl_s)
        self.blocks = self.scheduler.block_manager
        self.sequences: list[Sequence] = []
        self.answers: dict[int, int] = {}  # output tokens that each comes to
        self.content: dict[int, tuple[Any, ...]] = {}  # by slot: the token whose KV is there, and all before it

    @rule(
        start=st.sampled_from([0, 0, 0, 50, 90]), length=st.integers(1, 60), output=st.integers(1, 36), share=st.floats(0.1, 1.0),
        priority=st.integers(-1, 1), salt=st.sampled_from(["", "", "s"]),
    )  # fmt: skip
    def arrive(self, start: int, length: int, output: int, share: float, priority: int, salt: str) -> None:
        """Prompts are runs of the natural numbers from one of three starts: many have prefixes in common."""
        self.add(list(range(start, start + length)), output, share, priority=priority, cache_salt=salt)

    @rule(length=st.integers(1, 40), output=st.integers(1, 20), n=st.integers(2, 4), share=st.floats(0.1, 1.0))
    def arrive_in_a_group(self, length: int, output: int, n: int, share: float) -> None:
        for _ in range(n):
            self.add(list(range(length)), output, share, group_id=f"group {len(self.sequences) // 4}-{length}")

    def add(self, prompt: list[int], output: int, share: float, **fields: Any) -> None:
        handle = len(self.sequences)
        sequence = make_sequence(handle, prompt, output, arrived_at=float(handle), **fields)
        self.sequences.append(sequence)
        self.answers[handle] = max(1, int(output * share))
        self.scheduler.add(sequence)

    @rule(which=st.integers(0, 1 << 20))
    def cancel(self, which: int) -> None:
        alive = [sequence for sequence in self.sequences if not sequence.is_finished]
        if alive:
            self.scheduler.finish(alive[which % len(alive)])

    @rule()
    def step(self) -> None:
        self.run_step()

    def run_step(self) -> bool:
        batch = self.scheduler.schedule()
        if batch is None:
            assert not self.scheduler.num_unfinished
            return False
        self.check_batch(batch)
        self.compute(batch)
        sampled = batch.sampled
        self.scheduler.advance(batch)
        self.scheduler.step_cost.observe(batch.num_tokens, batch.num_context_tokens, 0.001 + 0.0005 * batch.num_tokens)
        for sequence in sampled:
            self.scheduler.append(sequence, 1000 + sequence.handle)  # different answers to the same prompt
            if sequence.num_output_tokens == self.answers[sequence.handle]:
                self.scheduler.finish(sequence, is_complete=True)
        return True

    def check_batch(self, batch: ScheduledBatch) -> None:
        members = batch.decodes + [chunk.sequence for chunk in batch.chunks]
        assert len(set(members)) == len(members) <= MAX_SEQS
        assert 0 < batch.num_tokens <= MAX_TOKENS
        assert all(sequence.handle in self.scheduler.running for sequence in members)
        assert all(sequence.num_uncomputed_tokens == 1 for sequence in batch.decodes)
        assert all(0 < chunk.num_tokens <= chunk.sequence.num_uncomputed_tokens for chunk in batch.chunks)

    def compute(self, batch: ScheduledBatch) -> None:
        """What the model does to the cache: copies, then writes. A token's KV depends on all tokens before it, and on the salt."""
        read = [[self.content.get(source * BLOCK_SIZE + at) for at in range(BLOCK_SIZE)] for source, _ in batch.block_copies]
        assert len({target for _, target in batch.block_copies}) == len(batch.block_copies)
        for (_, target), values in zip(batch.block_copies, read, strict=True):
            self.content.update({target * BLOCK_SIZE + at: value for at, value in enumerate(values) if value is not None})
        written = set()
        for sequence, num_tokens in [(each, 1) for each in batch.decodes] + [(chunk.sequence, chunk.num_tokens) for chunk in batch.chunks]:
            for position in range(sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens):
                block_id = sequence.block_table[position // BLOCK_SIZE]
                assert self.blocks.ref_counts[block_id] == 1, "writes into a block that another holds"
                assert self.blocks.block_hashes[block_id] is None, "writes into a cached block"
                slot = block_id * BLOCK_SIZE + position % BLOCK_SIZE
                assert slot not in written
                written.add(slot)
                self.content[slot] = (sequence.cache_salt, *sequence.token_ids[: position + 1])
        for sequence in [*batch.decodes, *(chunk.sequence for chunk in batch.chunks)]:
            end = sequence.num_computed_tokens + next((chunk.num_tokens for chunk in batch.chunks if chunk.sequence is sequence), 1)
            for position in range(end):  # what its attention reads
                slot = sequence.block_table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
                assert self.content[slot] == (sequence.cache_salt, *sequence.token_ids[: position + 1])

    @invariant()
    def every_block_is_counted_once_for_each_holder(self) -> None:
        held = [block_id for sequence in self.sequences for block_id in sequence.block_table]
        assert self.blocks.ref_counts == [held.count(block_id) for block_id in range(self.blocks.num_blocks)]
        free = [*self.blocks.empty, *self.blocks.evictable]
        assert sorted([*set(held), *free]) == list(range(self.blocks.num_blocks))
        assert not self.blocks.copies

    @invariant()
    def the_prefix_cache_names_what_is_there(self) -> None:
        cached = {block_id: block_hash for block_id, block_hash in enumerate(self.blocks.block_hashes) if block_hash is not None}
        assert {block_hash: block_id for block_id, block_hash in cached.items()} == self.blocks.cached_blocks
        assert set(self.blocks.evictable) == {block_id for block_id in cached if self.blocks.ref_counts[block_id] == 0}

    @invariant()
    def only_running_sequences_hold_blocks(self) -> None:
        for sequence in self.sequences:
            is_running, is_waiting = sequence.handle in self.scheduler.running, sequence in self.scheduler.waiting
            assert is_running or not sequence.block_table
            assert is_running + is_waiting + sequence.is_finished == 1
            assert len(sequence.block_table) * BLOCK_SIZE >= sequence.num_computed_tokens

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(10_000):
            if not self.run_step():
                break
        assert all(sequence.is_finished for sequence in self.sequences)
        assert self.blocks.num_free_blocks == self.blocks.num_blocks
        assert not self.scheduler._groups
        if not isinstance(self.scheduler.admission, Predicted):
            return
        calibration = self.scheduler.admission.calibration
        assert 0 <= calibration.num_exceeded <= calibration.num_predictions


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def run(scheduler: Scheduler, answers: dict[int, int] | None = None, max_steps: int = 10_000) -> list[list[int]]:
    """Step until all is done. Returns the handles that began in each step."""
    begun: list[list[int]] = []
    known: set[int] = set()
    for _ in range(max_steps):
        batch = scheduler.schedule()
        if batch is None:
            return begun
        now = set(scheduler.running)
        begun.append(sorted(now - known))
        known |= now
        sampled = batch.sampled
        scheduler.advance(batch)
        for sequence in sampled:
            scheduler.append(sequence, 7)
            if sequence.num_output_tokens == (answers or {}).get(sequence.handle, sequence.params.max_tokens):
                scheduler.finish(sequence, is_complete=True)
    raise AssertionError("does not end")


def one_step(scheduler: Scheduler) -> ScheduledBatch:
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.advance(batch)
    for sequence in batch.decodes + [chunk.sequence for chunk in batch.chunks if chunk.sequence.num_uncomputed_tokens == 0]:
        scheduler.append(sequence, 7)
    return batch


def test_a_long_prompt_does_not_stall_running_sequences() -> None:
    scheduler = make_scheduler(num_blocks=64, max_num_seqs=4, max_batched_tokens=8)
    short = make_sequence(0, [1, 2], 50)
    scheduler.add(short)
    one_step(scheduler)
    scheduler.add(make_sequence(1, list(range(30)), 5))
    merged = scheduler.schedule()
    assert merged is not None
    assert merged.decodes == [short] == merged.sampled
    assert [(chunk.sequence.request_id, chunk.num_tokens) for chunk in merged.chunks] == [("1", 7)]


def test_a_target_for_the_time_between_tokens_sets_the_chunk() -> None:
    """Steps of 1 ms and 0.1 ms a token: beside one running sequence, a target of 3 ms leaves 19 tokens for the prompt."""
    scheduler = make_scheduler(num_blocks=400, max_batched_tokens=512, target_itl_s=0.003)
    for number in range(64):
        scheduler.step_cost.observe(1 + number, 5 * (number % 7), 0.001 + 0.0001 * (1 + number))
    scheduler.add(make_sequence(0, [1], 50))
    one_step(scheduler)
    scheduler.add(make_sequence(1, list(range(100)), 5))
    batch = one_step(scheduler)
    assert [chunk.num_tokens for chunk in batch.chunks] == [pytest.approx(19, abs=1)]


def test_equal_prefixes_are_computed_once() -> None:
    scheduler = make_scheduler(num_blocks=64, max_batched_tokens=64)
    scheduler.add(make_sequence(0, list(range(22)), 3))
    run(scheduler)
    scheduler.add(make_sequence(1, [*range(18), 99, 98], 3))
    scheduler.add(make_sequence(2, list(range(22)), 3, cache_salt="other"))
    batch = one_step(scheduler)
    assert [(chunk.sequence.handle, chunk.num_tokens) for chunk in batch.chunks] == [(1, 4), (2, 22)]
    assert (scheduler.num_prefix_queries, scheduler.num_prefix_hits) == (22 + 20 + 22, 16)


def test_the_choices_of_one_prompt_share_its_blocks_and_part_at_the_first_token() -> None:
    scheduler = make_scheduler(num_blocks=64, max_batched_tokens=64)
    choices = [make_sequence(handle, list(range(10)), 5, group_id="g") for handle in range(3)]
    for choice in choices:
        scheduler.add(choice)
    assert [chunk.num_tokens for chunk in one_step(scheduler).chunks] == [10]
    batch = one_step(scheduler)
    assert batch.decodes == choices[:1]
    assert [(chunk.sequence.handle, chunk.num_tokens) for chunk in batch.chunks] == [(1, 1), (2, 1)]
    tables = [choice.block_table for choice in choices]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    assert batch.block_copies == [(tables[0][2], tables[1][2]), (tables[0][2], tables[2][2])]


def test_the_urgent_begin_first_but_nobody_starves() -> None:
    """One place. A level of priority is worth aging_s: what comes later than that no longer passes."""
    scheduler = make_scheduler(max_num_seqs=1, aging_s=10.0)
    arrivals = [(0.0, 0), (1.0, 1), (2.0, 0), (3.0, -1), (10.5, 0), (11.5, 0)]
    for handle, (arrived_at, priority) in enumerate(arrivals):
        scheduler.add(make_sequence(handle, [1, 2, 3], 2, arrived_at=arrived_at, priority=priority))
    assert [handle for step in run(scheduler) for handle in step] == [3, 0, 2, 4, 1, 5]


def test_the_last_in_rank_gives_way() -> None:
    scheduler = make_scheduler("paged", num_blocks=8, max_num_seqs=3, max_batched_tokens=64)
    for handle, priority in enumerate((0, 1, 0)):
        scheduler.add(make_sequence(handle, list(range(handle * 100, handle * 100 + 7)), 12, arrived_at=float(handle), priority=priority))
    while not scheduler.num_preemptions:
        one_step(scheduler)
    assert [sequence.handle for sequence in scheduler.waiting] == [1]


def test_a_deadline_counts_only_while_a_sequence_has_not_begun() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    first, second = (make_sequence(handle, [1, 2], 5, deadline=10.0) for handle in range(2))
    scheduler.add(first)
    scheduler.add(second)
    one_step(scheduler)
    assert scheduler.waiting.expired(9.9) == []
    assert scheduler.waiting.expired(10.0) == [second]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_hold_what_they_say(strategy: str) -> None:
    """40 blocks, prompts of 8 tokens, up to 32 tokens of output (10 blocks in all), of which 8 come."""
    scheduler = make_scheduler(strategy, num_blocks=40, max_num_seqs=32, max_batched_tokens=512)
    answers = dict.fromkeys(range(200), 8)
    for handle in range(100):
        scheduler.add(make_sequence(handle, [handle] * 8, 32))
    most = 0
    for _ in range(2000):
        batch = scheduler.schedule()
        if batch is None:
            break
        most = max(most, len(scheduler.running))
        sampled = batch.sampled
        scheduler.advance(batch)
        for sequence in sampled:
            scheduler.append(sequence, 7)
            if sequence.num_output_tokens == answers[sequence.handle]:
                scheduler.finish(sequence, is_complete=True)
    assert scheduler.num_unfinished == 0
    if strategy == "reserve":
        assert most == 4 and scheduler.num_preemptions == 0
    elif strategy == "paged":
        assert most > 10 and scheduler.num_preemptions > 5
    else:  # as many as fit with answers of 8 tokens: 4 blocks each; learned from the first
        assert 8 <= most <= 10 and scheduler.num_preemptions <= 4
