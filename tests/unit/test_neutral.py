"""Values by which a client asks for nothing."""

from typing import Any

import orjson
import pytest

from services.requests.bodies.body import ANYTHING, OF_CHATS, OF_COMPLETIONS, OF_MESSAGES, Body
from services.requests.bodies.parse import parse
from services.requests.dialects.openai.schemas import ChatCompletionBody, CompletionBody, GenerateBody
from shared.model.sampling_params import SamplingParams
from shared.process.errors import Invalid

MESSAGE = {"role": "assistant", "content": "Hello."}
CHAT = {"model": "m", "messages": [MESSAGE]}
COMPLETION = {"model": "m", "prompt": "Hello."}
CASES: list[tuple[type[Body], dict[str, Any], str, Any]] = [
    *(
        (ChatCompletionBody, CHAT, field, OF_CHATS[field])
        for field in OF_CHATS
        if field not in ChatCompletionBody.model_fields
    ),
    *(
        (CompletionBody, COMPLETION, field, OF_COMPLETIONS[field])
        for field in OF_COMPLETIONS
        if field not in CompletionBody.model_fields
    ),
]


def read(kind: type[Body], body: dict[str, Any]) -> object:
    return parse(kind, orjson.dumps(body))


@pytest.mark.parametrize(("kind", "body", "field", "neutral"), CASES)
def test_a_value_that_asks_for_nothing_is_passed_over_and_any_other_is_refused(
    kind: type[Body], body: dict[str, Any], field: str, neutral: Any
) -> None:
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
        assert read(ChatCompletionBody, CHAT | {"messages": [MESSAGE | {field: value}]}) == read(
            ChatCompletionBody, CHAT
        )


def test_null_is_no_value() -> None:
    nothing = dict.fromkeys(
        ("n", "stream", "stream_options", "ignore_eos", "priority", "cache_salt", "user", "whatever")
    )
    assert read(ChatCompletionBody, CHAT | nothing) == read(ChatCompletionBody, CHAT)
    assert read(CompletionBody, COMPLETION | nothing | {"echo": None}) == read(CompletionBody, COMPLETION)
    for field, body in (("messages", CHAT), ("prompt", COMPLETION)):
        with pytest.raises(Invalid, match=field):
            read(ChatCompletionBody if body is CHAT else CompletionBody, body | {field: None})
    with pytest.raises(Invalid, match=r"messages\[0\].content"):
        read(ChatCompletionBody, CHAT | {"messages": [MESSAGE | {"content": None}]})


OF_OTHER_NAMES: list[tuple[str, Any, str, Any]] = [
    ("repeat_penalty", 1.3, "repetition_penalty", 1.3),
    ("n_predict", 7, "max_tokens", 7),
    ("n_predict", -1, "max_tokens", -1),
    ("seed", -1, "seed", None),
    ("seed", -2, "seed", -2),
    ("seed", (1 << 63) - 1, "seed", (1 << 63) - 1),
]


@pytest.mark.parametrize(("name", "value", "here", "meant"), OF_OTHER_NAMES)
@pytest.mark.parametrize(("kind", "body"), [(ChatCompletionBody, CHAT), (CompletionBody, COMPLETION)])
def test_what_other_servers_call_otherwise_has_its_meaning(
    kind: type[Body], body: Any, name: str, value: Any, here: str, meant: Any
) -> None:
    asked = parse(kind, orjson.dumps(body | {name: value}))
    assert getattr(asked, here) == meant and asked.passed_over == []
    assert isinstance(asked, ChatCompletionBody | CompletionBody)
    assert asked.params() == parse(kind, orjson.dumps(body | {here: meant})).params()  # type: ignore[attr-defined]


SAME_MEANING: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"stop": ""}, {}),
    ({"stop": []}, {}),
    ({"stop": ["a", ""]}, {"stop": "a"}),
    ({"n_predict": -2}, {"max_tokens": -1}),
    ({"logit_bias": {}}, {}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"top_k": 5.0}, {"top_k": 5}),
]


@pytest.mark.parametrize(("fields", "same"), SAME_MEANING)
@pytest.mark.parametrize(("kind", "body"), [(ChatCompletionBody, CHAT), (CompletionBody, COMPLETION)])
def test_two_ways_to_say_it_mean_the_same(
    kind: type[Body], body: Any, fields: dict[str, Any], same: dict[str, Any]
) -> None:
    asked, plain = (parse(kind, orjson.dumps(body | each)) for each in (fields, same))
    assert isinstance(asked, GenerateBody) and isinstance(plain, GenerateBody)
    meant, said_plainly = asked.intent(), plain.intent()  # type: ignore[attr-defined]
    assert (meant.requests, meant.record) == (said_plainly.requests, said_plainly.record)


def test_as_many_tokens_as_fit_are_no_sixteen() -> None:
    assert CompletionBody.model_validate(COMPLETION | {"max_tokens": -1}).params().max_tokens is None
    assert CompletionBody.model_validate(COMPLETION).params().max_tokens == 16
    assert ChatCompletionBody.model_validate(CHAT | {"max_completion_tokens": -1}).params().max_tokens is None


def test_a_share_of_nothing_is_greedy() -> None:
    assert SamplingParams(top_p=0.0).is_greedy and not SamplingParams(top_p=0.01).is_greedy


WRONG: list[tuple[dict[str, Any], str, str]] = [
    (
        {"repeat_penalty": 1.3, "repetition_penalty": 1.2},
        "repeat_penalty",
        "repeat_penalty: it differs from repetition_penalty: give one",
    ),
    ({"n_predict": 3, "max_tokens": 4}, "n_predict", "n_predict: it differs from max_tokens: give one"),
    ({"repeat_penalty": 0}, "repeat_penalty", "repeat_penalty: "),
    ({"seed": 1.5}, "seed", "seed: "),
    ({"truncation_side": "right"}, "truncation_side", "unknown or unsupported field: truncation_side"),
    ({"stop": "x" * 257}, "stop", "stop takes strings of 1 to 256 characters, got one of 257 characters"),
    ({"top_p": -0.1}, "top_p", "top_p must be between 0.0 and 1.0, got -0.1"),
    ({"max_tokens": -3}, "max_tokens", "max_tokens: "),
    ({"stop": [5]}, "stop[0]", "stop[0]: expected a text, got an integer"),
    ({"stop": 5}, "stop", "stop: expected a text or a list of texts, got an integer"),
    ({"stop": ["a"] * 17}, "stop", "stop: takes at most 16 items, got 17"),
]


@pytest.mark.parametrize(("fields", "param", "message"), WRONG)
@pytest.mark.parametrize(("kind", "body"), [(ChatCompletionBody, CHAT), (CompletionBody, COMPLETION)])
def test_what_is_wrong_is_said_in_one_sentence(
    kind: type[Body], body: Any, fields: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(Invalid) as refused:
        parse(kind, orjson.dumps(body | fields)).params()  # type: ignore[attr-defined]
    assert (
        refused.value.param == param and str(refused.value).startswith(message) and str(refused.value).count(";") == 0
    )
