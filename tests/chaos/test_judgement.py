"""Does the harness see what it looks for? Answers and token logs that are wrong in one way each,
without any process.
"""

import random
import signal
from itertools import pairwise
from typing import Any

import pytest

from shared.wire.messages import TokenEvent, encode
from tests.chaos.answers import Answer, Wrong
from tests.chaos.checks import log_problem
from tests.chaos.cluster import Slot, is_expected
from tests.chaos.faults import FAULTS, MOST_A_ROUND, choose
from tests.chaos.options import parse
from tests.chaos.rounds import plan

TOKENS = ["Water", " is", " held", "."]


def chunk(position: int, text: str | None = None) -> tuple[dict[str, Any], str]:
    """The event at a position, and its id."""
    is_last = position == len(TOKENS)
    piece = {
        "index": 0,
        "text": TOKENS[position - 1] if text is None else text,
        "finish_reason": "stop" if is_last else None,
    }
    return {"id": "cmpl-1", "choices": [piece]}, str(position)


def answer(*positions: int, known: Answer | None) -> Answer:
    made = Answer.empty(1)
    for position in positions:
        made.add_chunk(*chunk(position), known)
    return made


KNOWN = answer(1, 2, 3, 4, known=None)


def test_the_known_answer_is_right_however_it_was_resumed() -> None:
    resumed = answer(1, 2, known=KNOWN)
    resumed.add_chunk(*chunk(3), KNOWN)
    resumed.add_chunk(*chunk(4), KNOWN)
    resumed.compare(KNOWN, was_resumed=True)
    assert resumed.positions == [4]


@pytest.mark.parametrize(
    ("positions", "kind"), [((1, 2, 2), "doubled"), ((1, 2, 3, 2), "doubled"), ((1, 3), "missing"), ((2,), "missing")]
)
def test_a_token_that_comes_twice_or_never_is_seen_where_it_happens(positions: tuple[int, ...], kind: str) -> None:
    with pytest.raises(Wrong) as wrong:
        answer(*positions, known=KNOWN)
    assert wrong.value.kind == kind


def test_another_text_of_the_same_length_is_different() -> None:
    with pytest.raises(Wrong) as wrong:
        Answer.empty(1).add_chunk(*chunk(1, "Milk."), KNOWN)
    assert wrong.value.kind == "different"


def test_an_answer_that_ends_early_is_missing_its_end() -> None:
    with pytest.raises(Wrong) as wrong:
        answer(1, 2, known=KNOWN).compare(KNOWN, was_resumed=False)
    assert wrong.value.kind == "missing"


def entry(entry_id: str, finish_reason: Any = None) -> tuple[bytes, dict[bytes, bytes]]:
    position, is_end = (int(part) for part in entry_id.split("-"))
    return entry_id.encode(), {
        b"m": encode(TokenEvent("r.0", position, None if is_end else 7, "x", finish_reason=finish_reason))
    }


def test_logs_without_a_gap_and_with_one_end_are_whole() -> None:
    assert log_problem([entry("1-0"), entry("2-0", "length")]) is None
    assert log_problem([entry("1-0"), entry("1-1", "cancelled")]) is None
    assert log_problem([entry("0-1", "error")]) is None


def test_logs_with_a_gap_or_without_an_end_are_not() -> None:
    assert log_problem([entry("1-0"), entry("3-0", "stop")]) == "3-0 where 2-0 or 1-1 should be, of 2 entries"
    assert log_problem([entry("1-0"), entry("2-0")]) == "no end after 2-0"
    assert log_problem([entry("1-0", "stop"), entry("1-1", "error")]) == "1-1 after its end at 1-0"


def test_a_seed_gives_the_same_faults_and_few_slow_ones() -> None:
    faults = list(FAULTS.values())
    rounds = [plan(faults, random.Random(seed), 12.0, 99) for seed in range(200)]
    assert rounds == [plan(faults, random.Random(seed), 12.0, 99) for seed in range(200)]
    for family, most in MOST_A_ROUND.items():
        assert max(sum(each.fault.family == family for each in planned) for planned in rounds) == most
    assert {each.fault.name for planned in rounds for each in planned} == set(FAULTS)


def test_some_faults_begin_two_at_once_and_in_different_processes() -> None:
    for seed in range(20):
        planned = plan([*FAULTS.values()], random.Random(seed), 12, 99)
        pairs = [(one.fault, other.fault) for one, other in pairwise(planned) if other.pause_s == 0]
        assert all(not one.hits & other.hits for one, other in pairs) and planned[0].pause_s > 0
        assert len(pairs) < len(planned) / 2, "single ones, too"
    assert FAULTS["kill-compute+sampler"].hits == {"compute", "sampler"} and FAULTS["stop-redis"].hits == {"redis"}


def test_faults_are_chosen_by_pattern() -> None:
    assert [
        fault.name for fault in choose(("kill-*",), ("kill-every-*", "kill-*+*", "kill-redis", "kill-everything"))
    ] == ["kill-gateway", "kill-tokenizer", "kill-compute", "kill-sampler", "kill-rank"]
    with pytest.raises(ValueError, match="no fault is called nope"):
        choose(("nope",), ())


def test_the_minute_of_ci_draws_nothing_that_takes_long_or_needs_more_than_processes() -> None:
    drawn = choose((), ())
    assert all(fault.draw == "always" and fault.needs in (None, "ranks") for fault in drawn)
    assert {fault.draw for fault in choose((), (), ("always", "more"))} == {"always", "more"}
    assert {fault.draw for fault in choose((), (), ("long",))} == {"long"}
    assert [fault.name for fault in choose(("blind-*",), ())] == ["blind-compute"]


def test_a_group_may_end_by_itself_only_after_a_fault_hit_its_ranks() -> None:
    slot = Slot("compute", 1, "compute-1")
    assert not any(is_expected(slot, code) for code in (0, 1, 2))
    slot.is_rank_hit = True
    assert [is_expected(slot, code) for code in (1, 2, -signal.SIGSEGV)] == [True, True, False]


def test_the_ranks_of_a_run_are_those_of_its_computes() -> None:
    options = parse(["--tensor-parallel-size", "2", "--pipeline-parallel-size", "3", "--group-timeout-s", "2"])
    assert options.num_ranks == 6 and options.group_timeout_s == 2.0
    assert options.compute["tensor_parallel_size"] == "2" and options.compute["pipeline_parallel_size"] == "3"
    assert parse([]).num_ranks == 1
