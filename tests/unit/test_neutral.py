"""What a client may say and ask nothing by."""

from typing import Any

import orjson
import pytest

from services.requests.bodies.body import ANYTHING, OF_CHATS, OF_COMPLETIONS, OF_MESSAGES, Body
from services.requests.bodies.parse import parse
from services.requests.neutral.schemas import ChatCompletionBody, CompletionBody
from shared.process.errors import Invalid

MESSAGE = {"role": "assistant", "content": "Hello."}
CHAT = {"model": "m", "messages": [MESSAGE]}
COMPLETION = {"model": "m", "prompt": "Hello."}
CASES: list[tuple[type[Body], dict[str, Any], str, Any]] = [
    *((ChatCompletionBody, CHAT, field, OF_CHATS[field]) for field in OF_CHATS),
    *((CompletionBody, COMPLETION, field, OF_COMPLETIONS[field]) for field in OF_COMPLETIONS),
]


def read(kind: type[Body], body: dict[str, Any]) -> object:
    return parse(kind, orjson.dumps(body))


@pytest.mark.parametrize(("kind", "body", "field", "neutral"), CASES)
def test_a_value_that_asks_for_nothing_is_passed_over_and_any_other_is_refused(kind: type[Body], body: dict[str, Any], field: str, neutral: Any) -> None:
    values = [{"some": ["thing"]}, "thing", 7] if neutral is ANYTHING else neutral
    for value in (None, *values):
        assert read(kind, body | {field: value}) == read(kind, body)
    if neutral is not ANYTHING:
        with pytest.raises(Invalid, match=f"unknown or unsupported field: {field}"):
            read(kind, body | {field: {"type": "something else"}})


@pytest.mark.parametrize("field", sorted(OF_MESSAGES))
def test_a_message_that_we_sent_may_come_back(field: str) -> None:
    values = [[{"type": "url_citation"}], "thing"] if OF_MESSAGES[field] is ANYTHING else OF_MESSAGES[field]
    for value in (None, *values):
        assert read(ChatCompletionBody, CHAT | {"messages": [MESSAGE | {field: value}]}) == read(ChatCompletionBody, CHAT)


def test_null_is_no_value() -> None:
    nothing = dict.fromkeys(("n", "stream", "stream_options", "ignore_eos", "priority", "cache_salt", "user", "whatever"))
    assert read(ChatCompletionBody, CHAT | nothing) == read(ChatCompletionBody, CHAT)
    assert read(CompletionBody, COMPLETION | nothing | {"echo": None}) == read(CompletionBody, COMPLETION)
    for field, body in (("messages", CHAT), ("prompt", COMPLETION)):
        with pytest.raises(Invalid, match=field):
            read(ChatCompletionBody if body is CHAT else CompletionBody, body | {field: None})
    with pytest.raises(Invalid, match=r"messages\[0\].content"):
        read(ChatCompletionBody, CHAT | {"messages": [MESSAGE | {"content": None}]})
