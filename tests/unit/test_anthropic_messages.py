"""Anthropic's blocks as a chat's messages, and what is said as Anthropic's events, read by its own package."""

from typing import Any

import orjson
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from services.gateway.api.anthropic.routes import result_of
from services.requests.bodies.parse import parse
from services.requests.dialects.anthropic.blocks import read_messages
from services.requests.dialects.anthropic.chat import chat_of
from services.requests.dialects.anthropic.events import MessageEvents
from services.requests.dialects.anthropic.schemas import MessagesBody
from services.requests.store.record import make_record
from services.requests.text.answers.answer import Delta
from services.requests.text.answers.translate import is_broken_off
from shared.process.errors import Invalid
from shared.wire.messages import RequestError
from tests.unit.deltas import USAGE, begun, call, chats, last_arguments
from tests.unit.deltas import end as ended

EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


@given(chats, st.sampled_from(["stop", "length", "tool_calls"]), st.sampled_from([None, "end", 7]))
def test_what_the_package_makes_of_the_events_is_the_whole_message(chat: list[Delta], end: str, stop: Any) -> None:
    made = MessageEvents(make_record("message", "m", "m"))
    events = made.opening(None)
    for delta in chat:
        events += made.add(delta)
    events += made.add(ended(end, stop)) + made.closing(USAGE, {})
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in events:
        sent = orjson.loads(made.encode(event).partition(b"\ndata: ")[2])
        if sent.get("delta", {}).get("type") != "input_json_delta":  # the deltas here are any texts, not JSON
            snapshot = accumulate_event(event=EVENT.validate_python(sent), current_snapshot=snapshot, json_bufs=buffers)
    whole = Message.model_validate(made.whole())
    if (
        whole.stop_reason == "max_tokens"
        and snapshot.content
        and snapshot.content[-1].type == "tool_use"
        and is_broken_off(last_arguments(chat))
    ):
        snapshot.content.pop()  # a stream has told of it already
    assert [block.type for block in snapshot.content] == [block.type for block in whole.content]
    for before, after in zip(snapshot.content, whole.content, strict=True):
        assert before.type == "tool_use" or getattr(before, before.type) == getattr(after, before.type)
    assert (snapshot.stop_reason, snapshot.stop_sequence, snapshot.usage.output_tokens) == (
        whole.stop_reason,
        whole.stop_sequence,
        4,
    )
    has_called = bool(begun(chat))
    reasons = {"stop": "tool_use" if has_called else "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
    assert whole.stop_reason == ("stop_sequence" if stop == "end" else reasons[end])
    assert whole.usage.input_tokens == 2 and whole.usage.cache_read_input_tokens == 1
    assert "".join(block.text for block in whole.content if block.type == "text") == "".join(
        delta.content for delta in chat
    )
    assert "".join(block.thinking for block in whole.content if block.type == "thinking") == "".join(
        delta.reasoning for delta in chat
    )


@pytest.mark.parametrize("arguments", ["", '{"a": ', '{"a": 1'])
def test_a_call_that_was_cut_off_is_not_in_the_message(arguments: str) -> None:
    made = MessageEvents(make_record("message", "m", "m"))
    for delta in [*call("f", ['{"a": 1}']), *call("g", [arguments]), ended("length")]:
        made.add(delta)
    made.closing(USAGE, {})
    assert [(block["name"], block["input"]) for block in made.whole()["content"]] == [("f", {"a": 1})]
    assert made.whole()["stop_reason"] == "max_tokens"


def test_a_call_s_arguments_are_an_object() -> None:
    made = MessageEvents(make_record("message", "m", "m"))
    for delta in call("f", ['{"a"', ": 1}"]):
        made.add(delta)
    made.closing(USAGE, {})
    assert made.content == [{"type": "tool_use", "id": "call_f", "name": "f", "input": {"a": 1}}]


def test_blocks_become_messages_with_calls_and_their_answers() -> None:
    conversation = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "Let me see."},
                {
                    "type": "tool_use",
                    "id": "call_1",
                    "name": "weather",
                    "input": {"at": "here"},
                    "toolset_name": None,
                },  # as the package dumps a block of ours
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"at":"here"}'}}
    assert read_messages(conversation) == [
        (0, {"role": "user", "content": "Weather?"}),
        (1, {"role": "assistant", "content": "Let me see.", "reasoning_content": "Hm.", "tool_calls": [call]}),
        (2, {"role": "tool", "tool_call_id": "call_1", "content": "rain"}),
        (2, {"role": "user", "content": "So?"}),
    ]


def test_messages_of_one_role_that_follow_each_other_are_one_turn() -> None:
    call = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    seen = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    assert read_messages(
        [
            {"role": "user", "content": "One."},
            {"role": "user", "content": [{"type": "text", "text": "Two."}]},
            {"role": "user", "content": ""},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}]},
            {"role": "assistant", "content": "Well."},
            {"role": "assistant", "content": [call]},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c", "content": "3"},
                    {"type": "text", "text": "So?"},
                ],
            },
            {"role": "user", "content": [seen]},
            {"role": "system", "content": "Be brief."},
            {"role": "system", "content": "Now."},
        ]
    ) == [
        (0, {"role": "user", "content": "One.\n\nTwo."}),
        (
            3,
            {
                "role": "assistant",
                "content": "Well.",
                "reasoning_content": "Hm.",
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                ],
            },
        ),
        (6, {"role": "tool", "tool_call_id": "c", "content": "3"}),
        (
            6,
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "So?"},
                    {"type": "text", "text": "\n\n"},
                    {"type": "image_url", "image_url": {"url": "http://x/y.png"}},
                ],
            },
        ),
        (8, {"role": "system", "content": "Be brief."}),
        (9, {"role": "system", "content": "Now."}),
    ]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"stop_sequences": ["x" * 1000]}, "stop_sequences"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"top_k": -5}, "top_k"),
        ({"compaction": {"type": "summary"}}, "compaction"),
        ({"thread": {"type": "continue", "previous_message_id": "msg_1"}}, "thread"),
    ],
)
def test_a_wrong_field_has_anthropic_s_name(more: dict[str, Any], param: str) -> None:
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]} | more
    with pytest.raises(Invalid) as caught:
        chat_of(parse(MessagesBody, orjson.dumps(body)))
    assert caught.value.param == param, caught.value


def test_a_line_of_a_batch_with_a_thread_has_the_error_that_the_package_knows() -> None:
    error = {
        "message": "thread: no",
        "type": "invalid_request_error",
        "param": "thread",
        "code": "thread_unsupported_request",
    }
    line = {
        "custom_id": "a",
        "response": {"status_code": 400, "request_id": "r", "body": {"error": error}},
        "error": None,
    }
    told = result_of(line)["result"]["error"]["error"]
    assert told == {
        "type": "invalid_request_error",
        "message": "thread: no",
        "details": {"error_code": "thread_unsupported_request"},
    }


def test_an_error_in_a_stream_is_an_event() -> None:
    made = MessageEvents(make_record("message", "m", "m"))
    (event,) = made.failed(RequestError("lost", 500), USAGE)
    assert (
        made.encode(event) == b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"lost"}}\n\n'
    )
