"""Only a client whose conversation has a slow template waits for it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.tokenizer import chat_template, slow_templates
from services.tokenizer.chat_template import SLOW
from shared.model.sampling_params import SamplingParams
from shared.wire.messages import ChatMessage, ChatOptions, GenerateRequest
from shared.wire.token_log import parse_log
from tests.conftest import running_redis
from tests.stages.line_of_stages import MODEL, LineOfStages, hurried
from tests.waiting import wait_until

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = "{% for message in messages %}{{ message.content }} {{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None) -> Iterator[LineOfStages]:
    with running_redis(tmp_path_factory.mktemp("templates"), redis_binary) as url, hurried():
        line = LineOfStages(url)
        with line.running():
            yield line


def chat(request_id: str, template: str = "", content: str = "Hi") -> GenerateRequest:
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    return GenerateRequest(
        request_id,
        "gateway-1",
        MODEL,
        params,
        messages=(ChatMessage("user", content),),
        chat=ChatOptions(chat_template=template),
    )


def last(line: LineOfStages, request: GenerateRequest) -> Any:
    return parse_log(line.log(request.request_id))[-1]


def test_ordinary_chats_are_all_answered_while_slow_templates_wait(
    line: LineOfStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_templates, "WAIT_S", 600.0)
    monkeypatch.setattr(chat_template, "RENDER_LIMIT_S", 1.0)
    hostile = [chat(f"hostile{number}.0", LOOP) for number in range(4)]
    ordinary = [chat(f"ordinary{number}.0") for number in range(8)]
    line.submit(*[each for pair in zip(hostile, ordinary, strict=False) for each in pair], *ordinary[len(hostile) :])
    wait_until(
        lambda: all(line.has_ended(each.request_id) for each in ordinary),
        description="the ordinary ones are answered",
        timeout_s=120,
    )
    assert not all(line.has_ended(each.request_id) for each in hostile)
    assert {last(line, each).finish_reason for each in ordinary} == {"length"}
    line.answer(timeout_s=300)
    wait_until(
        lambda: all(line.has_ended(each.request_id) for each in hostile),
        description="the slow ones have ended",
        timeout_s=300,
    )
    for each in hostile:
        error = last(line, each).error
        assert error is not None and (error.status, error.param, error.code) == (
            400,
            "chat_template",
            "chat_template_error",
        )
        assert "the request's chat_template refuses these messages: it takes more than 1 s" in error.message


def test_a_template_that_a_request_brings_is_used(line: LineOfStages) -> None:
    asked = chat("own.0", DOUBLED, "twice")
    line.answer(asked)
    assert last(line, asked).finish_reason == "length"
    assert last(line, asked).num_prompt_tokens == len(
        line.tokenizer.encoder.tokenizer("twice twice", add_special_tokens=False)["input_ids"]
    )


def test_what_the_model_s_own_template_is_slow_with_waits_elsewhere(
    line: LineOfStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [chat(f"before{number}.0") for number in range(3)]
    expected = [parse_log(log) for log in line.answer(*asked).values()]
    quick = line.tokenizer.encoder.chat_template
    monkeypatch.setattr(quick, "render", lambda conversations, _: [SLOW] * len(conversations))
    held: list[str] = []
    hold = line.tokenizer.templates.hold

    def noted(delivery: Any) -> Any:
        held.append(delivery.message.request_id)
        return hold(delivery)

    monkeypatch.setattr(line.tokenizer.templates, "hold", noted)
    again = [chat(f"after{number}.0") for number in range(3)]
    found = [parse_log(log) for log in line.answer(*again).values()]
    assert sorted(held) == [each.request_id for each in again]
    assert [[event.token_id for event in log] for log in found] == [
        [event.token_id for event in log] for log in expected
    ]


def test_a_tenant_with_too_many_slow_templates_is_told_so(line: LineOfStages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_templates, "MAX_OF_TENANT", 1)
    monkeypatch.setattr(chat_template, "RENDER_LIMIT_S", 0.2)
    asked = [chat(f"many{number}.0", LOOP) for number in range(8)]
    line.submit(*asked)
    wait_until(
        lambda: all(line.has_ended(each.request_id) for each in asked), description="all have ended", timeout_s=200
    )
    statuses = [last(line, each).error.status for each in asked]
    assert set(statuses) == {400, 429}
