"""Speculation in the pipeline: whatever is drafted, and however much of it is wrong, the logs are
byte for byte those without drafts.
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from services.compute.scheduling.drafts import Drafting
from services.compute.scheduling.new_step import NewStep
from services.compute.scheduling.policy import StepPolicy
from services.compute.sequence.batch import ScheduledBatch
from services.compute.speculation.control import DraftControl, DraftKind
from services.compute.speculation.model_free import make_proposers
from services.compute.speculation.proposer import Drafts, Proposer, Wanted
from services.compute.speculation.speculation import Speculation
from shared.model.constraint import Constraint
from shared.wire.messages import Control, SchedulingParams, encode
from shared.wire.streams import CONTROL, MESSAGE
from shared.wire.token_log import parse_log
from tests.conftest import running_redis
from tests.kernels.drawing import DrawingSearch
from tests.stages.line_of_stages import LineOfStages, ask, delay_masks, hurried
from tests.stages.test_flight import REQUESTS as OF_ALL_KINDS
from tests.waiting import wait_until

SCHEMA = '{"type":"object","properties":{"a_long_name":{"type":"boolean"},"another_name":{"enum":["red","green"]}},"required":["a_long_name","another_name"]}'  # noqa: E501
PAIR = structs.replace(
    ask("pair.0", "A river and a mountain", max_tokens=16, seed=5), scheduling=SchedulingParams(group_id="pair")
)
REQUESTS = (
    *OF_ALL_KINDS,
    PAIR,
    structs.replace(PAIR, request_id="pair.1", params=structs.replace(PAIR.params, seed=6)),
    structs.replace(
        ask("predicted.0", "A river", max_tokens=24, seed=3), prediction=" and a mountain of trees, the end of it"
    ),
    structs.replace(ask("schema.0", "Say it", max_tokens=80, seed=2), constraint=Constraint("json_schema", SCHEMA)),
    ask(
        "repeats.0",
        "one two three four one two three four one two three",
        max_tokens=40,
        temperature=0.0,
        ignore_eos=True,
    ),
)


@dataclass
class Liar:
    """Knows the answers, and says them, or something else."""

    answers: dict[str, list[int]]  # by request id
    rng: random.Random
    share_wrong: float
    name: str = "liar"
    needs_hidden: bool = False
    runs_model: bool = False
    stops_itself: bool = True
    num_computed: dict[int, int] = field(default_factory=dict)  # by handle: tokens of its output that it heard of

    def propose(self, wanted: Mapping[int, Wanted]) -> dict[int, Drafts]:
        return {handle: Drafts(self.guess(each), self.rng.randrange(9)) for handle, each in wanted.items()}

    def guess(self, wanted: Wanted) -> list[int]:
        sequence = wanted.sequence
        assert wanted.max_drafts > 0 and not sequence.tokens.is_pending and sequence.num_uncomputed_tokens == 1
        guess = self.answers[sequence.request.request_id][sequence.tokens.num_output :][
            : self.rng.randrange(wanted.max_drafts + 4)
        ]
        if self.rng.random() < self.share_wrong:
            wrong = (-3, 10**6, 7, *sequence.request.eos_token_ids, self.rng.randrange(1000))
            guess.insert(self.rng.randrange(len(guess) + 1), self.rng.choice(wrong))
        return guess

    def computed(self, batch: ScheduledBatch, hidden: Any, decided: Mapping[int, int]) -> None:
        assert hidden is not None
        rows = {row.handle: row for row in batch.rows}
        for handle, count in decided.items():
            assert 0 < count <= len(rows[handle].sampled)
            first = rows[handle].decides[0].position
            assert first == self.num_computed.get(handle, first - 1) + 1, "it hears of each token once, in order"
            self.num_computed[handle] = first + count - 1

    def forget(self, handle: int) -> None:
        self.num_computed.pop(handle, None)


class All(DraftControl):
    """Takes whatever is offered."""

    def choose(self, offers: Mapping[int, tuple[DraftKind, int]], num_decodes: int) -> dict[int, int]:  # noqa: ARG002
        return {handle: count for handle, (_, count) in offers.items()}

    def best_length(self, name: str, handles: list[int], num_decodes: int, max_drafts: int, draft_s: float) -> int:  # noqa: ARG002
        return max_drafts


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None) -> Iterator[LineOfStages]:
    with running_redis(tmp_path_factory.mktemp("speculation"), redis_binary) as url, hurried():
        line = LineOfStages(url)
        with line.running():
            yield line


@pytest.fixture(scope="module")
def expected(line: LineOfStages) -> dict[str, Any]:
    """The logs without drafts."""
    speculate(line)
    return answer(line)


@pytest.fixture
def answers(expected: dict[str, Any]) -> dict[str, list[int]]:
    events = {name: log if name.startswith("pair") else parse_log(log) for name, log in expected.items()}
    return {name: [event.token_id for event in some if event.token_id is not None] for name, some in events.items()}


def answer(line: LineOfStages) -> dict[str, Any]:
    """The logs of all requests. How much of its prompt one of a pair finds computed is a matter of when it came."""
    found: dict[str, Any] = line.answer(*REQUESTS)
    return {
        name: [structs.replace(event, num_cached_tokens=0) for event in parse_log(log)]
        if name.startswith("pair")
        else log
        for name, log in found.items()
    }


def speculate(line: LineOfStages, *proposers: Proposer) -> Speculation:
    """From now on these propose, while nothing runs."""
    compute = line.compute
    compute.speculation = found = Speculation(proposers, compute.constraints, compute.executor.vocab_size, All())
    compute.admitter.speculation = found
    compute.base_policy = replace(compute.base_policy, drafting=found.drafting(16, 64))
    line.forget_logs()
    return found


@pytest.mark.parametrize("is_in_flight", [False, True])
@pytest.mark.parametrize("share_wrong", [0.0, 0.7])
def test_logs_are_the_same_with_drafts(
    line: LineOfStages,
    expected: dict[str, Any],
    answers: dict[str, list[int]],
    share_wrong: float,
    is_in_flight: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    search = line.compute.executor.row_search
    monkeypatch.setattr(
        line.compute.executor,
        "row_search",
        DrawingSearch(search, random.Random(1), share_wrong=0.1) if is_in_flight else search,
    )
    num_steps = line.compute.meter.num_steps
    speculation = speculate(line, Liar(answers, random.Random(1), share_wrong))
    assert answer(line) == expected
    assert (
        speculation.total.num_accepted_tokens > 30
        and sum(speculation.accepted_by_place) == speculation.total.num_accepted_tokens
    )
    assert speculation.total.num_accepted_tokens < speculation.total.num_draft_tokens or not share_wrong
    if not share_wrong and not is_in_flight:
        assert line.compute.meter.num_steps - num_steps < max(map(len, answers.values())), (
            "fewer steps than the longest answer has tokens"
        )
    assert not speculation.tallies, "who has ended is forgotten"


def test_logs_are_the_same_with_the_proposers_of_auto(line: LineOfStages, expected: dict[str, Any]) -> None:
    speculation = speculate(line, *make_proposers(("auto",), line.compute.constraints))
    assert answer(line) == expected
    assert speculation.total.num_accepted_tokens > 20


def test_an_answer_that_was_predicted_is_drafted_and_counted(line: LineOfStages, expected: dict[str, Any]) -> None:
    """The usage is a matter of the texts, and the same without drafts."""
    first = ask("first.0", "A river", max_tokens=24, seed=9, ignore_eos=True)
    speculate(line)
    events = parse_log(line.answer(first)["first.0"])
    text = "".join(event.text for event in events)
    again = structs.replace(first, request_id="first.0", prediction=text)
    line.forget_logs()
    plain = line.answer(again)
    speculation = speculate(line, *make_proposers(("prediction",), line.compute.constraints))
    assert line.answer(again) == plain
    assert [event.token_id for event in parse_log(plain["first.0"])] == [event.token_id for event in events]
    accepted, rejected = parse_log(plain["first.0"])[-1].prediction_tokens
    assert accepted > 15 and rejected < 8 and speculation.total.num_accepted_tokens > 8
    accepted, rejected = parse_log(expected["predicted.0"])[-1].prediction_tokens
    assert accepted < rejected


def test_what_a_schema_forces_is_drafted(line: LineOfStages, expected: dict[str, Any]) -> None:
    """Where the text can be put together from tokens in one way only."""
    speculation = speculate(line, *make_proposers(("grammar",), line.compute.constraints))
    forced = [each for each in REQUESTS if each.constraint is not None]
    assert line.answer(*forced) == {each.request_id: expected[each.request_id] for each in forced}
    assert speculation.total.num_draft_tokens > 5


@pytest.mark.parametrize("is_slow", [False, True])
def test_drafts_whose_masks_are_late_come_again(
    line: LineOfStages,
    expected: dict[str, Any],
    answers: dict[str, list[int]],
    monkeypatch: pytest.MonkeyPatch,
    is_slow: bool,
) -> None:
    """Nobody waits for a mask, and each takes longer than a step; is_slow: all are filled before
    their rows run, and nothing is drafted behind them.
    """
    delay_masks(monkeypatch, 0.005, is_slow=is_slow)
    speculate(line, Liar(answers, random.Random(2), 0.3))
    assert answer(line) == expected


def test_logs_are_the_same_with_preemptions(
    line: LineOfStages, expected: dict[str, Any], answers: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, rng = line.compute.scheduler, random.Random(3)
    schedule = scheduler.schedule

    def crowded(policy: StepPolicy) -> ScheduledBatch | None:
        if len(scheduler.running) > 1 and rng.random() < 0.3:
            scheduler._preempt(rng.choice(list(scheduler.running.values())), NewStep())
        return schedule(policy)

    monkeypatch.setattr(scheduler, "schedule", crowded)
    num_preemptions = scheduler.num_preemptions
    speculation = speculate(line, Liar(answers, random.Random(3), 0.3))
    found = answer(line)
    assert scheduler.num_preemptions > num_preemptions and speculation.total.num_accepted_tokens
    assert found == expected


def test_who_is_cancelled_amid_drafts_leaves_the_others_as_they_are(
    line: LineOfStages, expected: dict[str, Any], answers: dict[str, list[int]]
) -> None:
    others = [
        structs.replace(ask(f"other{number}.0", "On and on", max_tokens=900, temperature=0.0, ignore_eos=True))
        for number in range(3)
    ]
    speculation = speculate(
        line, Liar(answers | {each.request_id: [7] * 900 for each in others}, random.Random(4), 0.5)
    )
    line.submit(*others)
    wait_until(
        lambda: len(line.compute.scheduler.running) == len(others) and speculation.total.num_drafts > 3,
        description="all of them run",
    )
    line.submit(*REQUESTS)
    line.client.xadd(CONTROL.key, {MESSAGE: encode(Control("cancel", tuple(each.request_id for each in others)))})
    line.answer()
    assert [parse_log(line.log(each.request_id))[-1].finish_reason for each in others] == ["cancelled"] * len(others)
    alone = [each.request_id for each in REQUESTS if not each.request_id.startswith("pair")]
    assert {name: line.log(name) for name in alone} == {name: expected[name] for name in alone}


def test_drafting_is_off_where_nobody_proposes(line: LineOfStages) -> None:
    assert speculate(line).drafting(16, 64) is None
    assert isinstance(
        speculate(line, *make_proposers(("lookup",), line.compute.constraints)).drafting(16, 64), Drafting
    )
