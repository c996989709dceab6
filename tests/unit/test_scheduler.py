"""The scheduler by example: who begins, who gives way, what is computed once, and how far a
sequence runs ahead of its decisions.
"""

from collections.abc import Collection

import pytest

from services.compute.cache.block_manager import BlockManager
from services.compute.scheduling.admission import STRATEGIES, Predicted
from services.compute.scheduling.offline import run_step
from services.compute.scheduling.policy import PLAIN, StepPolicy
from services.compute.scheduling.scheduler import RETRY_EVERY, Scheduler
from services.compute.sequence import Sequence
from services.compute.sequence.batch import BatchRow, ScheduledBatch
from shared.model.segments import Layout, Segment
from tests.unit.sequences import counted, handles_of, make_scheduler, make_sequence


def sevens(batch: ScheduledBatch, sequences: list[Sequence]) -> list[int]:
    return [7] * len(sequences)


def chunks(batch: ScheduledBatch) -> list[tuple[int, int]]:
    """Handle and tokens of each row that is more than a decode."""
    return [(row.handle, row.num_tokens) for row in batch.rows[batch.num_decodes :]]


def run(scheduler: Scheduler, policy: StepPolicy = PLAIN, *, max_steps: int = 10_000) -> list[list[int]]:
    """Step until all is done. Returns the handles that began in each step."""
    begun: list[list[int]] = []
    known: set[int] = set()

    def decide(batch: ScheduledBatch, sequences: list[Sequence]) -> list[int]:
        begun.append(sorted(set(scheduler.running) - known))
        known.update(scheduler.running)
        return sevens(batch, sequences)

    for _ in range(max_steps):
        if run_step(scheduler, decide, policy=policy) is None:
            return begun
    raise AssertionError("does not end")


def one_step(scheduler: Scheduler, policy: StepPolicy = PLAIN) -> ScheduledBatch:
    batch = run_step(scheduler, sevens, is_over=lambda _: False, policy=policy)
    assert batch is not None
    return batch


def test_a_long_prompt_does_not_stall_running_sequences() -> None:
    scheduler = make_scheduler(num_blocks=64, max_num_seqs=4, max_batched_tokens=8)
    short = make_sequence(0, [1, 2], 50)
    scheduler.add(short)
    one_step(scheduler)
    scheduler.add(make_sequence(1, list(range(30)), 5))
    merged = scheduler.schedule()
    assert merged is not None
    assert [row.handle for row in merged.rows[: merged.num_decodes]] == [short.handle] == handles_of(merged)
    assert chunks(merged) == [(1, 7)]


def test_a_target_for_the_time_between_tokens_sets_the_chunk() -> None:
    """Steps of 1 ms and 0.1 ms a token: beside one running sequence, a target of 3 ms leaves 19
    tokens for the prompt.
    """
    scheduler = make_scheduler(num_blocks=400, max_batched_tokens=512, target_itl_s=0.003)
    for number in range(64):
        scheduler.step_cost.observe(1 + number, 5 * (number % 7), 0.001 + 0.0001 * (1 + number))
    scheduler.add(make_sequence(0, [1], 50))
    one_step(scheduler)
    scheduler.add(make_sequence(1, list(range(100)), 5))
    batch = one_step(scheduler)
    [(handle, num_tokens)] = chunks(batch)
    assert handle == 1 and num_tokens == pytest.approx(19, abs=1)


def test_equal_prefixes_are_computed_once() -> None:
    scheduler = make_scheduler(num_blocks=64, max_batched_tokens=64)
    scheduler.add(make_sequence(0, list(range(22)), 3))
    run(scheduler)
    scheduler.add(make_sequence(1, [*range(18), 99, 98], 3))
    scheduler.add(make_sequence(2, list(range(22)), 3, cache_salt="other"))
    batch = one_step(scheduler)
    assert chunks(batch) == [(1, 2), (2, 22)]  # found to the token
    assert (scheduler.prefixes.num_queries, scheduler.prefixes.num_hits) == (22 + 20 + 22, 18)


def test_the_choices_of_one_prompt_share_its_blocks_and_part_at_the_first_token() -> None:
    scheduler = make_scheduler(num_blocks=64, max_batched_tokens=64)
    choices = [make_sequence(handle, list(range(10)), 5, group_id="g") for handle in range(3)]
    for choice in choices:
        scheduler.add(choice)
    assert chunks(one_step(scheduler)) == [(0, 10)]
    batch = one_step(scheduler)
    assert [row.handle for row in batch.rows[: batch.num_decodes]] == [0]
    assert chunks(batch) == [(1, 1), (2, 1)]
    tables = [choice.kv.block_table for choice in choices]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert len({table[2] for table in tables}) == 3
    assert batch.block_copies == ((tables[0][2], tables[1][2]), (tables[0][2], tables[2][2]))


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
        scheduler.add(
            make_sequence(
                handle, list(range(handle * 100, handle * 100 + 7)), 12, arrived_at=float(handle), priority=priority
            )
        )
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
    for handle in range(100):
        scheduler.add(make_sequence(handle, [handle] * 8, 32))
    most = 0

    def decide(batch: ScheduledBatch, sequences: list[Sequence]) -> list[int]:
        nonlocal most
        most = max(most, len(scheduler.running))
        return sevens(batch, sequences)

    for _ in range(2000):
        if run_step(scheduler, decide, is_over=lambda sequence: sequence.tokens.num_output == 8) is None:
            break
    assert scheduler.num_unfinished == 0
    if strategy == "reserve":
        assert most == 4 and scheduler.num_preemptions == 0
    elif strategy == "paged":
        assert most > 10 and scheduler.num_preemptions > 5
    else:  # as many as fit with answers of 8 tokens: 4 blocks each; learned from the first
        assert 8 <= most <= 10 and scheduler.num_preemptions <= 4


def foresee(scheduler: Scheduler, token_id: int = 7) -> ScheduledBatch | None:
    """A step whose tokens are foreseen: nothing is decided."""
    batch = scheduler.schedule()
    if batch is not None:
        for handle, _ in batch.sampled:
            scheduler.get(handle).tokens.foresee(token_id)
    return batch


@pytest.mark.parametrize("run_ahead", [0, 1, 3])
def test_a_sequence_runs_ahead_of_its_decisions_as_far_as_it_may(run_ahead: int) -> None:
    scheduler = make_scheduler(run_ahead=run_ahead)
    sequence = make_sequence(0, [1, 2, 3], 20)
    scheduler.add(sequence)
    for _ in range(run_ahead + 1):
        assert foresee(scheduler) is not None
    assert sequence.tokens.num_undecided == run_ahead + 1
    assert scheduler.schedule() is None
    scheduler.confirm(sequence)
    batch = foresee(scheduler)
    assert batch is not None
    assert batch.rows == (BatchRow(0, (7,), 3 + run_ahead, tuple(sequence.kv.block_table), range(1), 3),)
    assert scheduler.schedule() is None


def test_what_came_otherwise_is_computed_again_and_nothing_else() -> None:
    scheduler = make_scheduler(run_ahead=3)
    sequence = make_sequence(0, [1, 2, 3], 20)
    scheduler.add(sequence)
    for _ in range(4):
        foresee(scheduler)
    scheduler.confirm(sequence)
    scheduler.truncate(sequence, 4)
    scheduler.append(sequence, 8)
    assert sequence.tokens.ids == [1, 2, 3, 7, 8] and sequence.kv.num_computed == 4
    batch = foresee(scheduler)
    assert batch is not None and [(row.token_ids, row.num_computed_tokens) for row in batch.rows] == [((8,), 4)]


def test_nothing_is_computed_upon_a_foreseen_end_unless_it_was_none() -> None:
    scheduler = make_scheduler(run_ahead=3)
    sequence = make_sequence(0, [1, 2, 3], 20)
    scheduler.add(sequence)
    foresee(scheduler)
    sequence.tokens.end()
    assert scheduler.schedule() is None
    scheduler.truncate(sequence, 3)
    scheduler.append(sequence, 8)
    batch = scheduler.schedule()
    assert batch is not None and handles_of(batch) == [0]


def test_the_prefix_cache_waits_for_decisions() -> None:
    scheduler = make_scheduler(run_ahead=3)
    sequence, blocks = make_sequence(0, [1, 2, 3], 20), scheduler.block_manager
    scheduler.add(sequence)
    for _ in range(3):
        foresee(scheduler)
    assert sequence.kv.num_computed == 5 and not blocks.cached_blocks
    scheduler.confirm(sequence)
    assert list(blocks.cached_blocks.values()) == sequence.kv.block_table[:1]


def test_what_was_cut_off_leaves_no_hash_behind() -> None:
    """Looked up with what it foresaw, as when it begins again, a block is cached with what was decided."""
    scheduler = make_scheduler(run_ahead=3)
    sequence, blocks = make_sequence(0, [1, 2, 3], 20), scheduler.block_manager
    scheduler.add(sequence)
    for _ in range(4):
        foresee(scheduler)
    assert blocks.match(sequence) == []
    scheduler.truncate(sequence, 3)
    scheduler.append(sequence, 8)
    foresee(scheduler)
    assert blocks.match(make_sequence(1, [1, 2, 3, 7, 7], 20)) == []
    assert blocks.match(make_sequence(1, [1, 2, 3, 8, 7], 20)) == sequence.kv.block_table[:1]


def test_penalties_count_only_what_is_there() -> None:
    sequence = make_sequence(0, [7, 7], 20)
    scheduler = make_scheduler(run_ahead=3)
    scheduler.add(sequence)
    for token_id in (7, 8, 7, 9):
        foresee(scheduler, token_id)
    assert counted(sequence.tokens.output_counts(len(sequence.tokens))) == {7: 2, 8: 1, 9: 1}
    scheduler.confirm(sequence)
    scheduler.truncate(sequence, 4)
    assert counted(sequence.tokens.output_counts(len(sequence.tokens))) == {7: 1, 8: 1}
    scheduler.truncate(sequence, 3)
    scheduler.append(sequence, 9)
    assert counted(sequence.tokens.output_counts(len(sequence.tokens))) == {7: 1, 9: 1}


def test_who_runs_apart_has_every_other_step() -> None:
    scheduler = make_scheduler()
    for handle in range(3):
        scheduler.add(make_sequence(handle, [1, 2, 3], 20))
    one_step(scheduler)
    scheduler.add(make_sequence(3, [5], 20))
    policy = StepPolicy(apart=frozenset([1, 3]))
    assert [handles_of(one_step(scheduler, policy)) for _ in range(4)] == [[1, 3], [0, 2], [1, 3], [0, 2]]
    policy = StepPolicy(apart=frozenset([9]))
    assert [handles_of(one_step(scheduler, policy)) for _ in range(2)] == [[0, 1, 2, 3]] * 2, (
        "a turn that nobody takes is everybody's"
    )
    assert handles_of(one_step(scheduler)) == [0, 1, 2, 3]


def test_the_next_turn_goes_on_in_the_block_where_the_last_one_ended() -> None:
    """Blocks have four tokens: nine of the ten were computed, the last of them in a block of its own."""
    blocks = BlockManager(24, 4)
    scheduler = make_scheduler(blocks=blocks)
    scheduler.add(make_sequence(1, [1, 2, 3, 4, 5, 6], 4))
    run(scheduler)
    after = make_sequence(2, [1, 2, 3, 4, 5, 6, 7, 7, 7, 7, 8, 9], 2)
    matched = blocks.match(after)
    assert len(matched) == 2
    end = blocks.match_end(after, matched)
    assert end is not None and end[1] == 1 and end[0] not in matched
    scheduler.add(after)
    assert [row.num_computed_tokens for row in one_step(scheduler).rows] == [9]
    other = make_sequence(3, [1, 2, 3, 4, 5, 6, 7, 7, 5, 7], 2)
    assert blocks.match_end(other, blocks.match(other)) is None, "another token stands there"


@pytest.mark.parametrize("apart", [frozenset[int](), frozenset([1])])
def test_who_waits_alone_is_restored_whether_apart_or_not(apart: frozenset[int]) -> None:
    """A suspect that a dead replica left, and nobody else."""
    scheduler = make_scheduler()
    policy = StepPolicy(awaits_restoring=True, apart=apart)
    sequence = make_sequence(1, [5, 6], 3)
    scheduler.add(sequence)
    assert scheduler.schedule(policy) is None
    assert sequence in scheduler.next_to_begin(policy)
    sequence.kv.is_restored = True
    assert handles_of(one_step(scheduler, policy)) == [1]


def test_who_runs_apart_preempts_nobody() -> None:
    """The others have taken all places, or all memory."""
    for scheduler in (make_scheduler("paged", max_num_seqs=2), make_scheduler("paged", num_blocks=4)):
        for handle in range(2):
            scheduler.add(make_sequence(handle, [handle] * 7, 5))
        one_step(scheduler)
        one_step(scheduler)
        scheduler.add(make_sequence(2, [1, 2, 3, 4, 5], 5, arrived_at=9.0))
        assert [2] in run(scheduler, StepPolicy(apart=frozenset([2])))
        assert scheduler.num_preemptions == 0


def test_what_was_foreseen_in_a_cached_block_is_not_written_there() -> None:
    """A sequence gives way, and begins again on blocks that another has left, and that hold what it
    foresees; but decided is something else.
    """
    scheduler = make_scheduler("paged", run_ahead=3, num_blocks=8)
    first, second = (make_sequence(handle, list(range(8)), 20, arrived_at=float(handle)) for handle in range(2))
    scheduler.add(first)
    one_step(scheduler)
    scheduler.add(second)
    first.tokens.end()  # so that only the second runs
    for _ in range(9):
        if second.tokens.num_undecided == 3:
            scheduler.confirm(second)
        foresee(scheduler)
    first.tokens.truncate(len(first.tokens))  # it goes on
    second.tokens.end()
    for _ in range(13):
        one_step(scheduler)
    assert second in scheduler.waiting and (second.tokens.num_decided, len(second.tokens)) == (14, 17)
    scheduler.finish(first, is_complete=True)
    second.tokens.truncate(len(second.tokens))
    foresee(scheduler)
    scheduler.truncate(second, 14)
    scheduler.append(second, 8)
    batch = scheduler.schedule()
    assert batch is not None
    [row] = batch.rows
    assert (row.token_ids, row.num_computed_tokens) == ((8,), 14)
    written, blocks = row.block_table[3], scheduler.block_manager
    assert blocks.ref_counts[written] == 1 and blocks.block_hashes[written] is None


def test_a_prompt_that_no_token_is_asked_of_counts_with_its_blocks() -> None:
    admission = Predicted(BlockManager(24, 4))
    admission.observe([])
    assert admission.admits(make_sequence(1, list(range(60)), 0), [])
    assert not admission.admits(make_sequence(2, list(range(60)), 0), [])


def test_what_is_cached_of_a_prompt_s_segments_is_passed_over_wherever_it_stands() -> None:
    """The first module is not cached, the others are: they cost no step each."""
    blocks = BlockManager(200, 16)
    scheduler = make_scheduler(blocks=blocks, max_batched_tokens=512)

    def ask(handle: int, modules: list[int]) -> tuple[int, int]:
        """The steps until its first token, and the tokens that they computed."""
        segments = (
            Segment(16, 0),
            *(Segment(32, 100 * each, (0,)) for each in modules),
            Segment(3, 900, tuple(range(len(modules) + 1))),
        )
        layout = Layout(segments, 16)
        slots = layout.pad([*range(16), *(100 * each + at for each in modules for at in range(32)), 7, 8, 9])
        scheduler.add(sequence := make_sequence(handle, slots, 1, layout=layout))
        batches = []
        while not sequence.is_finished:
            batches.append(run_step(scheduler, lambda _, sampled: [5] * len(sampled), is_over=lambda _: True))
        return len(batches), sum(batch.num_tokens for batch in batches if batch is not None)

    assert ask(1, [1, 2, 3, 4, 5]) == (7, 16 + 5 * 32 + 3)
    assert ask(2, [6, 1, 2, 3, 4, 5]) == (2, 32 + 3)
    assert ask(3, [1, 7, 2, 8, 3]) == (3, 2 * 32 + 3)
    assert blocks.num_free_blocks == blocks.num_blocks


def test_blocks_that_others_hold_behind_a_gap_are_no_room() -> None:
    """Two compute one prompt at once: the cache has the first block of one, and the others of the
    other. Without the first, nobody shares the others.
    """
    blocks = BlockManager(12, 16)
    layout = Layout((Segment(64, 0), Segment(3, 900, (0,))), 16)
    slots = layout.pad(list(range(67)))
    one, other, third = (make_sequence(handle, slots, 1, layout=layout) for handle in range(3))
    for sequence, num_tokens in ((one, 16), (other, 64)):
        assert blocks.grow(sequence, 67)
        sequence.kv.num_computed = num_tokens
        blocks.commit(sequence)
    assert blocks.num_held(third, blocks.match(third)) == 4
    blocks.free(one)
    for _ in range(blocks.num_free_blocks - len(blocks.evictable)):
        blocks._take()
    blocks._release(blocks._take())  # evicted: the first block that `one` had cached
    assert len(blocks.cached_blocks) == 3 and blocks.num_held(third, []) == 0 and blocks.match(third) == []


@pytest.mark.parametrize("strategy", ["predicted", "paged"])
def test_nobody_gives_a_place_to_one_that_would_not_fit(strategy: str) -> None:
    """Every place is taken, and an urgent sequence needs more memory than the one that would give way has."""
    scheduler = make_scheduler(strategy, num_blocks=12, max_num_seqs=2, max_batched_tokens=64)
    long, short = (
        make_sequence(1, list(range(24)), 4, priority=5),
        make_sequence(2, list(range(100, 108)), 4, priority=5, arrived_at=1.0),
    )
    scheduler.add(long)
    scheduler.add(short)
    one_step(scheduler)
    scheduler.add(urgent := make_sequence(3, list(range(200, 228)), 4, priority=-50, arrived_at=2.0))
    one_step(scheduler)
    assert [*scheduler.running] == [1, 2] and scheduler.num_preemptions == 0, (
        "with the place of the second it would lack blocks of the first"
    )
    scheduler.finish(long)
    one_step(scheduler)
    assert urgent.handle in scheduler.running


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_heads_of_both_queues_wait_after_they_did_not_fit(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While suspects run apart there are two queues: each head is looked at again some steps later."""
    scheduler = make_scheduler(strategy, num_blocks=12, max_batched_tokens=64)
    policy = StepPolicy(apart=frozenset({2, 4}))
    for handle in (1, 2):
        scheduler.add(make_sequence(handle, list(range(100 * handle, 100 * handle + 20)), 4, arrived_at=handle))
        one_step(scheduler, policy)
    for handle in (3, 4):
        scheduler.add(make_sequence(handle, list(range(100 * handle, 100 * handle + 30)), 4, arrived_at=handle))
    looks, observe = list[int](), scheduler.admission.observe

    def look(running: Collection[Sequence]) -> None:
        looks.append(len(running))
        observe(running)

    monkeypatch.setattr(scheduler.admission, "observe", look)
    for _ in range(RETRY_EVERY):  # no token is decided, so nothing runs: both queues are asked each time
        scheduler.schedule(policy)
    assert {*scheduler.running} == {1, 2} and len(looks) == 2, "each of them was looked at once"
