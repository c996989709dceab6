"""The typed events of a response, for any deltas of an answer: OpenAI's types, whole items, and the
same numbers for every reader.
"""

from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from services.requests.dialects.responses.events import ResponseEvents
from services.requests.dialects.responses.items import messages_of, read_input, with_ids
from services.requests.store.record import make_record
from services.requests.text.answers.answer import Delta
from shared.wire.logprobs import TokenLogprob
from shared.wire.messages import RequestError
from tests.unit.deltas import USAGE, begun, chats, content
from tests.unit.deltas import end as ended

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
ASKED = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "metadata": {}}

ends = st.sampled_from(["stop", "length", "error", "cancelled"])


def events_of(
    chat: list[Delta], end: str, *, is_background: bool, after: int = -1
) -> tuple[ResponseEvents, list[dict[str, Any]]]:
    """All events as they reach a reader, and what made them."""
    record = make_record("response", "m", "m", is_background=is_background)
    made = ResponseEvents(record, ASKED, after=after)
    sent = b"".join(map(made.encode, made.opening(None)))
    for delta in chat:
        sent += b"".join(map(made.encode, made.add(delta)))
    if end in ("stop", "length"):
        last = made.add(ended(end)) + made.closing(USAGE, {})
    else:
        last = made.failed(RequestError("no", 499 if end == "cancelled" else 500, code=end), USAGE)
    sent += b"".join(map(made.encode, last))
    return made, [orjson.loads(block.partition(b"\ndata: ")[2]) for block in sent.split(b"\n\n")[:-1]]


@given(chats, ends, st.booleans())
def test_events_are_openai_s_and_tell_what_the_object_holds(chat: list[Delta], end: str, is_background: bool) -> None:
    made, events = events_of(chat, end, is_background=is_background)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        assert EVENT.validate_python(event).type == event["type"]
    whole = made.whole()
    assert events[-1]["response"] == whole and Response.model_validate(whole).status == whole["status"]
    assert (
        whole["status"]
        == {"stop": "completed", "length": "incomplete", "error": "failed", "cancelled": "cancelled"}[end]
    )
    kinds = {
        "message": ("content", "response.output_text.delta"),
        "reasoning": ("reasoning", "response.reasoning_text.delta"),
    }
    for index, item in enumerate(whole["output"]):
        own = [event for event in events if event.get("output_index") == index]
        assert own[0]["type"] == "response.output_item.added" and own[-1] == {
            **own[-1],
            "type": "response.output_item.done",
            "item": item,
        }
        delta_type = kinds[item["type"]][1] if item["type"] in kinds else "response.function_call_arguments.delta"
        said = "".join(event["delta"] for event in own if event["type"] == delta_type)
        assert said == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
    for kind, (field, _) in kinds.items():
        said = "".join(item["content"][0]["text"] for item in whole["output"] if item["type"] == kind)
        assert said == "".join(getattr(delta, field) for delta in chat)
    assert [item["call_id"] for item in whole["output"] if item["type"] == "function_call"] == [
        call.call_id for call in begun(chat)
    ]


def without_logprobs(output: list[dict[str, Any]]) -> list[dict[str, Any]]:
    parts = [
        [{key: value for key, value in part.items() if key != "logprobs"} for part in item.get("content", [])]
        for item in output
    ]
    return [item | {"id": "", "content": content} for item, content in zip(output, parts, strict=True)]


@given(chats, ends)
def test_logprobs_of_thoughts_and_calls_begin_no_message(chat: list[Delta], end: str) -> None:
    """Each delta with the logprob of its token, also one whose text is held back."""
    plain, given = (ResponseEvents(make_record("response", "m", "m"), ASKED) for _ in range(2))
    for number, delta in enumerate(chat):
        last = replace(delta, finish_reason=end if number == len(chat) - 1 else None)
        plain.add(last)
        given.add(replace(last, logprobs=[TokenLogprob(str(number), b"", -1.0)]))
    for made in (plain, given):
        made.closing(USAGE, {})
    assert without_logprobs(given.output) == without_logprobs(plain.output)
    said = [
        entry["token"]
        for item in orjson.loads(orjson.dumps(given.output))
        if item["type"] == "message"
        for entry in item["content"][0]["logprobs"]
    ]
    assert {str(number) for number, delta in enumerate(chat) if delta.content} <= set(said) and said == sorted(
        set(said), key=int
    )


@given(chats, ends, st.booleans(), st.integers(-1, 30))
def test_a_reader_that_comes_back_gets_exactly_what_it_lacks(
    chat: list[Delta], end: str, is_background: bool, after: int
) -> None:
    everything = events_of(chat, end, is_background=is_background)[1]
    rest = events_of(chat, end, is_background=is_background, after=after)[1]
    assert [(event["type"], event["sequence_number"]) for event in rest] == [
        (event["type"], event["sequence_number"]) for event in everything[after + 1 :]
    ]


@given(chats)
def test_what_the_model_said_goes_back_as_messages(chat: list[Delta]) -> None:
    """The output's items are an input; the messages hold every text and call in order."""
    output = events_of(chat, "stop", is_background=False)[0].whole()["output"]
    if not output:
        return
    messages, begins = messages_of(with_ids(read_input(output), "resp_x"))
    assert begins == sorted(begins) and len(begins) == len(messages)
    assert all(message["role"] == "assistant" for message in messages)
    assert "".join(message["content"] for message in messages) == "".join(delta.content for delta in chat)
    arguments = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls", ())]
    assert arguments == [item["arguments"] for item in output if item["type"] == "function_call"]


def test_a_conversation_with_tools_becomes_a_chat_with_tools() -> None:
    items = read_input(
        [
            {"role": "user", "content": "Weather?"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {
                "type": "function_call",
                "id": "fc_1",
                "call_id": "call_1",
                "name": "weather",
                "arguments": "{}",
                "status": "completed",
            },
            {"type": "function_call", "call_id": "call_2", "name": "time", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
            {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "noon"}]},
            {
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Rain.", "annotations": [], "logprobs": []}],
            },
        ]
    )
    calls = [
        {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for number, name in ((1, "weather"), (2, "time"))
    ]
    messages, begins = messages_of(items)
    assert messages == [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "content": "rain", "tool_call_id": "call_1"},
        {"role": "tool", "content": "noon", "tool_call_id": "call_2"},
        {"role": "assistant", "content": "Rain."},
    ]
    assert begins == [0, 1, 4, 5, 6]


@pytest.mark.parametrize("code", ["resumed_elsewhere", "gateway_draining"])
def test_an_interruption_takes_no_number(code: str) -> None:
    made = ResponseEvents(make_record("response", "m", "m"), ASKED)
    made.opening(None)
    (event,) = made.interrupted(RequestError("bye", 503, code=code))
    assert event["sequence_number"] == 1 and EVENT.validate_python(event).type == "error"
    assert code != "gateway_draining" or "starting_after=1" in event["message"]
    assert made.add(content("x"))[0]["sequence_number"] == 2
