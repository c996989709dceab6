"""One answer in the bytes of each API: a thought, a text, a call, logprobs and an end.
tests/recorded/answers/ has the bytes.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from msgspec import structs

from services.requests.dialects.anthropic.events import MessageEvents
from services.requests.dialects.ollama import lines
from services.requests.dialects.ollama.lines import OllamaLines
from services.requests.dialects.responses.events import ResponseEvents
from services.requests.store.record import ResponseRecord
from services.requests.text.answers.choice import Choice, usage_of
from services.requests.text.answers.formats import Frames, format_for, is_plain
from services.requests.text.answers.sse import encode_event
from services.requests.text.answers.translate import Fold, Translation
from shared.model.parsing.answer import Parsing
from shared.wire.logprobs import TokenLogprob, TopLogprob
from shared.wire.messages import TokenEvent

RECORDED = Path("tests/recorded/answers")
TEXTS = [
    "<think>",
    "Hm",
    ".",
    "</think>",
    "Let ",
    "me ",
    "",
    "add.",
    "<tool_call>\n",
    '{"name": "add", "argu',
    'ments": {"a": 1}',
    "}\n</tool",
    "_call>",
    "",
]
ASKED: dict[str, Any] = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "metadata": {}}


def record_of(kind: str) -> ResponseRecord:
    parsing = None if kind == "text_completion" else Parsing("qwen3", "hermes", ("add",))
    return ResponseRecord(
        "resp_" + "0" * 32,
        kind,
        "name",
        1,
        1,
        1,
        True,
        "model",
        parsing=parsing,
        fingerprint="fp_1",
        has_continuous_usage=True,
    )


def event_of(number: int) -> TokenEvent:
    text, is_end = TEXTS[number], number == len(TEXTS) - 1
    logprob = TokenLogprob(text, text.encode(), -0.5, (TopLogprob("x", b"x", -1.5, 7),), token_id=number, is_end=is_end)
    return TokenEvent("r.0", number + 1, number, text, 9, 4, (logprob,), finish_reason="stop" if is_end else None)


EVENTS = [event_of(number) for number in range(len(TEXTS))]


def chunks(kind: str) -> bytes:
    record = record_of(kind)
    choice, form = Choice.begin(0, record), format_for(record)
    return b"".join(
        encode_event(chunk) for event in EVENTS for chunk in form.chunks(choice, event, choice.add(event))
    ) + encode_event(form.usage_chunk([choice]))


def folded(kind: str, make: Callable[[ResponseRecord], Translation]) -> bytes:
    record = record_of(kind)
    fold = Fold(record, made := make(record))
    return fold.encode(made.opening(EVENTS[0])) + b"".join(fold.encode(fold.add(event)) for event in EVENTS)


WRITERS: dict[str, Callable[[], bytes]] = {
    "openai": lambda: chunks("chat.completion"),
    "completion": lambda: chunks("text_completion"),
    "anthropic": lambda: folded("message", MessageEvents),
    "ollama": lambda: folded("ollama", lambda record: OllamaLines(record, is_chat=True)),
    "responses": lambda: folded("response", lambda record: ResponseEvents(record, ASKED)),
}


@pytest.mark.parametrize("api", WRITERS)
def test_an_answer_has_the_bytes_that_were_recorded(api: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "now_text", lambda: "2026-01-01T00:00:00.000000Z")
    monkeypatch.setattr(time, "monotonic_ns", lambda: 1)
    assert WRITERS[api]() == (RECORDED / api).read_bytes()


def test_usage_counts_each_prompt_once() -> None:
    choices = [Choice.begin(index, record_of("message")) for index in range(2)]
    for choice in choices:
        for event in EVENTS:
            choice.add(event)
    used = usage_of(choices, 2)
    assert (used.num_prompt_tokens, used.num_cached_tokens, used.num_output_tokens, used.num_reasoning_tokens) == (
        9,
        4,
        28,
        6,
    )


@pytest.mark.parametrize("kind", ["chat.completion", "text_completion"])
@pytest.mark.parametrize("parsing", [None, Parsing("qwen3", "hermes", ("add",))])
def test_a_chunk_with_nothing_but_text_has_the_bytes_of_any_chunk(kind: str, parsing: Parsing | None) -> None:
    record = replace(record_of(kind), parsing=parsing, has_continuous_usage=False, has_usage=True)
    choice, form = Choice.begin(0, record), format_for(record)
    frames, num_plain = Frames(form, record), 0
    for number, event in enumerate(EVENTS):
        odd = {"text": '"\n\\ü\0\u2028', "fingerprint": "fp_2"} if number == 5 else {}
        bare = structs.replace(event, logprobs=event.logprobs if number == 2 else None, **odd)
        delta = choice.add(bare)
        chunks = form.chunks(choice, bare, delta)
        if is_plain(bare, delta):
            num_plain += 1
            assert [frames.encode(choice, bare, delta.content)] == [orjson.dumps(chunk) for chunk in chunks]
    assert num_plain >= 2
