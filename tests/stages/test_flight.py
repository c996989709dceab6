"""A step in flight, in the pipeline: on a device that draws, and at times wrongly, the logs are
byte for byte those of a host that draws itself.
"""

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from services.compute.sequence import Prefix
from shared.model.constraint import Constraint
from shared.model.sampling_params import ChainParams, DryParams, SamplingParams
from shared.wire.entries import append_to_group
from shared.wire.messages import Control, TokenizedRequest, encode
from shared.wire.streams import CONTROL, MESSAGE, inflight_key, prompts
from shared.wire.token_log import parse_log
from tests.conftest import running_redis
from tests.kernels.drawing import DrawingSearch
from tests.stages.line_of_stages import MODEL, LineOfStages, ask, delay_masks, hurried, ids
from tests.waiting import wait_until

GRAMMAR = r"([a-z]{1,5} ){3,9}end"
REQUESTS = (
    ask("greedy.0", "The quick brown fox", max_tokens=24, temperature=0.0, ignore_eos=True),
    ask("drawn.0", "A river", max_tokens=24, seed=3, logprobs=2),
    ask("once.0", "A river", max_tokens=1, seed=4),
    ask(
        "penalized.0",
        "Once on a time",
        max_tokens=20,
        seed=7,
        frequency_penalty=1.0,
        repetition_penalty=1.2,
        min_tokens=5,
        top_p=0.9,
    ),
    ask(
        "chained.0",
        "Once on a time",
        max_tokens=12,
        seed=7,
        dry=DryParams(1.0, allowed_length=1),
        chain=ChainParams(typical_p=0.95, dynatemp_range=0.5),
    ),
    ask("stopped.0", "Tell me about the weather", max_tokens=20, temperature=0.0, stop=("er owns",), ignore_eos=True),
    ask("scored.0", "The sampler decides each token", max_tokens=8, top_k=5, prompt_logprobs=3),
    replace(ask("constrained.0", "Say it", max_tokens=60, seed=1), constraint=Constraint("regex", GRAMMAR)),
    replace(ask("allowed.0", "Say it", max_tokens=9, seed=1, allowed_token_ids=(40, 41, 42, 43), bad_words=("x",))),
)


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None) -> Iterator[LineOfStages]:
    with running_redis(tmp_path_factory.mktemp("flight"), redis_binary) as url, hurried():
        line = LineOfStages(url)
        with line.running():
            yield line


@pytest.fixture(scope="module")
def expected(line: LineOfStages) -> dict[str, Any]:
    """The logs, where the host draws."""
    found: dict[str, Any] = line.answer(*REQUESTS)
    return found


def draw_in_flight(line: LineOfStages) -> DrawingSearch:
    """From now on steps are in flight, and one draw of ten is wrong."""
    found = line.compute.executor.row_search
    line.compute.executor.row_search = search = (
        found if isinstance(found, DrawingSearch) else DrawingSearch(found, random.Random(1), share_wrong=0.1)
    )
    return search


def test_the_requests_end_in_all_ways(expected: dict[str, Any]) -> None:
    greedy, _, once, *_ = events = [parse_log(log) for log in expected.values()]
    assert len(greedy) == 24 and len(once) == 1
    assert {each[-1].finish_reason for each in events} == {"length", "stop"} and "er owns" in {
        each[-1].stop_reason for each in events
    }
    constrained = events[[each.request_id for each in REQUESTS].index("constrained.0")]
    assert re.fullmatch(GRAMMAR, "".join(event.text for event in constrained))


def test_logs_are_the_same_with_a_step_in_flight(line: LineOfStages, expected: dict[str, Any]) -> None:
    compute = line.compute
    search = draw_in_flight(line)
    line.forget_logs()
    num_surplus = compute.num_surplus_tokens
    assert line.answer(*REQUESTS) == expected
    assert search.num_wrong and compute.num_surplus_tokens > num_surplus, (
        "draws were wrong, and their rows were dropped"
    )
    assert compute.flight is None, "what is in flight lands when there is nothing else to do"


@pytest.mark.parametrize("is_slow", [False, True])
@pytest.mark.parametrize("is_in_flight", [False, True])
def test_rows_that_sit_out_get_the_same_bytes(
    line: LineOfStages, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch, is_slow: bool, is_in_flight: bool
) -> None:
    """Nobody waits for a mask, and each takes longer than a step; is_slow: all are filled before their rows run."""
    delay_masks(monkeypatch, 0.02, is_slow=is_slow)
    found = line.compute.executor.row_search
    line.compute.executor.row_search = (
        DrawingSearch(found, random.Random(1), share_wrong=0.1) if is_in_flight else found
    )
    held: list[int] = []
    hold_back, sitting_out = line.compute.hold_back, line.compute.constraints.sitting_out

    def counted(late: list[Prefix], handles: set[int]) -> None:
        held.extend(handles)
        hold_back(late, handles)

    def sat_out() -> frozenset[int]:
        found = sitting_out()
        held.extend(found)
        return found

    monkeypatch.setattr(line.compute, "hold_back", counted)
    monkeypatch.setattr(line.compute.constraints, "sitting_out", sat_out)
    line.forget_logs()
    try:
        assert line.answer(*REQUESTS) == expected
    finally:
        line.compute.executor.row_search = found
    assert held


def test_who_is_cancelled_in_flight_leaves_the_others_as_they_are(line: LineOfStages, expected: dict[str, Any]) -> None:
    compute = line.compute
    draw_in_flight(line)
    line.forget_logs()
    others = [
        replace(each, request_id=f"other{number}.0", params=replace(each.params, max_tokens=900, ignore_eos=True))
        for number, each in enumerate(REQUESTS[:1] * 3)
    ]
    line.submit(*others)
    wait_until(
        lambda: compute.flight is not None and len(compute.scheduler.running) == len(others),
        description="a step of all is in flight",
    )
    line.submit(*REQUESTS)
    line.client.xadd(CONTROL.key, {MESSAGE: encode(Control("cancel", tuple(each.request_id for each in others)))})
    line.answer()
    assert [parse_log(line.log(each.request_id))[-1].finish_reason for each in others] == ["cancelled"] * len(others)
    assert {each.request_id: line.log(each.request_id) for each in REQUESTS} == expected


@pytest.mark.parametrize(
    "field", ["logit_bias", "stop_token_ids", "allowed_token_ids", "bad_words", "eos_token_ids", "prompt"]
)
def test_tokens_that_the_model_has_not_are_refused_before_the_device_sees_them(line: LineOfStages, field: str) -> None:
    """As of a tokenizer with more tokens than the model: a GPU that is given an index beyond its
    tensor fails for good, and all that it computes with it.
    """
    beyond = line.compute.executor.vocab_size
    params = {
        "logit_bias": {"logit_bias": {beyond: 1.0}},
        "bad_words": {"bad_words_token_ids": ((7, beyond),)},
        "stop_token_ids": {"stop_token_ids": (5, beyond)},
        "allowed_token_ids": {"allowed_token_ids": (beyond,)},
    }.get(field, {})
    prompt, eos_token_ids = ids(30, beyond if field == "prompt" else 40), (beyond,) if field == "eos_token_ids" else ()
    asked = TokenizedRequest(
        f"strange-{field}.0", None, MODEL, SamplingParams(max_tokens=4, **params), prompt, eos_token_ids
    )
    line.client.hset(inflight_key(MODEL), asked.request_id, "4")
    with line.client.pipeline() as pipe:
        append_to_group(pipe, prompts(MODEL), asked)
        pipe.execute()
    wait_until(lambda: line.has_ended(asked.request_id), description="it is refused")
    (event,) = parse_log(line.log(asked.request_id))
    assert event.error is not None and event.error.status == 400 and event.error.param == field
    assert event.error.message == f"{field} holds token ids outside the vocabulary, [0, {beyond})"
