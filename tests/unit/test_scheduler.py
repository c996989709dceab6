"""The scheduler and the block manager under random arrivals, lengths and cancels: the invariants hold after every step."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.compute.block_manager import BlockManager
from services.compute.scheduler import Scheduler
from services.compute.sequence import Sequence
from shared.sampling_params import SamplingParams

NUM_BLOCKS, BLOCK_SIZE, MAX_SEQS, MAX_TOKENS = 24, 4, 5, 12


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(NUM_BLOCKS, BLOCK_SIZE)
        self.scheduler = Scheduler(self.blocks, max_num_seqs=MAX_SEQS, max_batched_tokens=MAX_TOKENS)
        self.sequences: list[Sequence] = []

    @rule(prompt=st.integers(1, 60), output=st.integers(1, 36))
    def arrive(self, prompt: int, output: int) -> None:
        handle = len(self.sequences)
        self.sequences.append(Sequence(handle, str(handle), list(range(prompt)), prompt, SamplingParams(max_tokens=output)))
        self.scheduler.add(self.sequences[-1])

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
        assert 0 < batch.num_tokens <= MAX_TOKENS and len(batch.sequences) <= MAX_SEQS
        kinds = [scheduled.num_scheduled_tokens > 1 for scheduled in batch.sequences]
        assert kinds == sorted(kinds)
        for scheduled in batch.sequences:
            sequence = scheduled.sequence
            assert 0 < scheduled.num_scheduled_tokens <= sequence.num_uncomputed_tokens
            assert len(sequence.block_table) * BLOCK_SIZE >= sequence.num_computed_tokens + scheduled.num_scheduled_tokens
        sampled = batch.sampled
        self.scheduler.advance(batch)
        for sequence in sampled:
            self.scheduler.append(sequence, 7)
            if sequence.num_tokens == sequence.max_num_tokens:
                self.scheduler.finish(sequence)
        return True

    @invariant()
    def every_block_is_in_one_place(self) -> None:
        used = [block for sequence in self.sequences for block in sequence.block_table]
        assert sorted(used + list(self.blocks.free_block_ids)) == list(range(NUM_BLOCKS))

    @invariant()
    def only_running_sequences_hold_blocks(self) -> None:
        for sequence in self.sequences:
            assert (sequence in self.scheduler.running) or not sequence.block_table
            assert sequence.is_finished != (sequence in self.scheduler.running or sequence in self.scheduler.waiting)

    def teardown(self) -> None:
        for _ in range(10_000):
            if not self.run_step():
                break
        assert all(sequence.is_finished for sequence in self.sequences)
        assert self.blocks.num_free_blocks == NUM_BLOCKS


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_long_prompt_does_not_stall_running_sequences() -> None:
    scheduler = Scheduler(BlockManager(64, 4), max_num_seqs=4, max_batched_tokens=8)
    short = Sequence(0, "short", [1, 2], 2, SamplingParams(max_tokens=50))
    scheduler.add(short)
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.advance(batch)
    scheduler.append(short, 3)
    scheduler.add(Sequence(1, "long", list(range(30)), 30, SamplingParams(max_tokens=5)))
    merged = scheduler.schedule()
    assert merged is not None
    assert [(each.sequence.request_id, each.num_scheduled_tokens) for each in merged.sequences] == [("short", 1), ("long", 7)]
    assert merged.sampled == [short]
