"""OpenAI's field `prediction`, through a whole pipeline: it changes no text, and usage says how
much of it came true.
"""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.deployment import MODEL, Deployment

CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is Penstock?"}],
    "max_tokens": 48,
    "seed": 7,
    "extra_body": {"ignore_eos": True},
}
SCHEMA = {
    "type": "object",
    "properties": {"size": {"type": "integer"}, "kind": {"enum": ["lock", "gate"]}},
    "required": ["size", "kind"],
}
FORM = {"type": "json_schema", "json_schema": {"name": "part", "schema": SCHEMA}}
WRONG = "Nothing of this comes: 1234567890, zebra, quartz, jukebox."


@pytest.fixture(scope="module")
def client(demo: Deployment) -> Iterator[openai.OpenAI]:
    with demo.client() as client:
        yield client


def ask(client: openai.OpenAI, prediction: Any = None, **fields: Any) -> Any:
    given = {} if prediction is None else {"prediction": {"type": "content", "content": prediction}}
    return client.chat.completions.create(**CHAT | fields | given)


def answers(reply: Any) -> list[Any]:
    """All that a client sees of the choices."""
    return [choice.model_dump() for choice in reply.choices]


def counts(reply: Any) -> tuple[int, int]:
    details = reply.usage.completion_tokens_details
    return details.accepted_prediction_tokens, details.rejected_prediction_tokens


def tokens_of(demo: Deployment, text: str) -> list[int]:
    tokens: list[int] = demo.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()["tokens"]
    return tokens


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 1.1, "n": 4},
        {"temperature": 0.7, "stop": [" of", "stage"], "logprobs": True, "top_logprobs": 3},
        {"temperature": 0.9, "frequency_penalty": 0.8, "presence_penalty": 0.4},
        {"temperature": 0.8, "response_format": FORM, "extra_body": {}},
    ],
    ids=["greedy", "n", "stop and logprobs", "penalties", "schema"],
)
def test_no_prediction_changes_an_answer(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    plain = ask(client, **fields)
    assert plain.usage.completion_tokens_details is None, "there was no prediction"
    text = plain.choices[0].message.content
    middle = len(text) // 2
    for prediction in (
        text,
        WRONG,
        f"{text[:middle]} and so on, {text[middle:]}",
        [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}],
    ):
        reply = ask(client, prediction, **fields)
        assert answers(reply) == answers(plain)
        assert reply.usage.completion_tokens == plain.usage.completion_tokens and min(counts(reply)) >= 0


def test_usage_counts_what_came_and_what_did_not(demo: Deployment, client: openai.OpenAI) -> None:
    text = ask(client, temperature=0).choices[0].message.content
    num_tokens = len(tokens_of(demo, text))
    accepted, rejected = counts(ask(client, text, temperature=0))
    assert accepted + rejected == num_tokens and accepted > 0.9 * num_tokens
    accepted, rejected = counts(ask(client, WRONG, temperature=0))
    assert accepted + rejected == len(tokens_of(demo, WRONG)) and accepted <= 2
    accepted, rejected = counts(ask(client, text + WRONG, temperature=0))
    assert accepted > 0.9 * num_tokens and rejected > 10


def test_each_of_several_choices_is_counted(demo: Deployment, client: openai.OpenAI) -> None:
    one = ask(client, temperature=1.1, n=3)
    text = one.choices[0].message.content
    reply = ask(client, text, temperature=1.1, n=3)
    accepted, rejected = counts(reply)
    assert answers(reply) == answers(one)
    assert accepted + rejected == 3 * len(tokens_of(demo, text)) and accepted > 0.9 * len(tokens_of(demo, text))


def test_a_stream_has_the_same_text_and_usage(client: openai.OpenAI) -> None:
    text = ask(client, temperature=0).choices[0].message.content
    whole = ask(client, text, temperature=0)
    chunks = list(ask(client, text, temperature=0, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert counts(chunks[-1]) == counts(whole)


def test_an_empty_prediction_is_none(client: openai.OpenAI) -> None:
    nothing: tuple[Any, ...] = ("", [])
    for prediction in nothing:
        assert ask(client, prediction).usage.completion_tokens_details is None


def test_a_bad_one_is_an_error_of_openais_client(client: openai.OpenAI) -> None:
    for prediction, param in (
        ({"type": "content", "content": 7}, "prediction.content"),
        ({"type": "text", "content": "x"}, "prediction.type"),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(**CHAT, prediction=prediction)
        assert error.value.param == param and error.value.type == "invalid_request_error"
