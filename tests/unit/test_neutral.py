"""What a client may say and ask nothing by."""

from typing import Any

import orjson
import pytest

from services.gateway.openai.neutral import ANYTHING, OF_MESSAGES, OF_REQUESTS
from services.gateway.openai.parse import parse
from shared.errors import Invalid

MESSAGE = {"role": "assistant", "content": "Hello."}
CHAT = {"model": "m", "messages": [MESSAGE]}
COMPLETION = {"model": "m", "prompt": "Hello."}


def read(kind: str, body: dict[str, Any]) -> object:
    return parse(kind, orjson.dumps(body))


@pytest.mark.parametrize("field", sorted(OF_REQUESTS))
def test_a_value_that_asks_for_nothing_is_passed_over_and_any_other_is_refused(field: str) -> None:
    values = [{"some": ["thing"]}, "thing", 7] if OF_REQUESTS[field] is ANYTHING else OF_REQUESTS[field]
    for kind, body in (("chat", CHAT), ("completion", COMPLETION)):
        for value in (None, *values):
            assert read(kind, body | {field: value}) == read(kind, body)
        if OF_REQUESTS[field] is not ANYTHING:
            with pytest.raises(Invalid, match=f"unknown or unsupported field: {field}"):
                read(kind, body | {field: {"type": "something else"}})


@pytest.mark.parametrize("field", sorted(OF_MESSAGES))
def test_a_message_that_we_sent_may_come_back(field: str) -> None:
    values = [[{"type": "url_citation"}], "thing"] if OF_MESSAGES[field] is ANYTHING else OF_MESSAGES[field]
    for value in (None, *values):
        assert read("chat", CHAT | {"messages": [MESSAGE | {field: value}]}) == read("chat", CHAT)


def test_null_is_no_value() -> None:
    nothing = dict.fromkeys(("n", "stream", "stream_options", "ignore_eos", "priority", "cache_salt", "user", "whatever"))
    assert read("chat", CHAT | nothing) == read("chat", CHAT)
    assert read("completion", COMPLETION | nothing | {"echo": None}) == read("completion", COMPLETION)
    for field, body in (("model", CHAT), ("messages", CHAT), ("prompt", COMPLETION)):
        with pytest.raises(Invalid, match=field):
            read("chat" if body is CHAT else "completion", body | {field: None})
    with pytest.raises(Invalid, match=r"messages\[0\].content"):
        read("chat", CHAT | {"messages": [MESSAGE | {"content": None}]})


def test_tools_are_refused_while_there_are_none() -> None:
    with pytest.raises(Invalid, match="unknown or unsupported field: tools"):
        read("chat", CHAT | {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "auto"})
