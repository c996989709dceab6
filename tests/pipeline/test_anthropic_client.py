"""The `anthropic` package against a real pipeline."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import jsonschema
import pytest

from tests.deployment import MODEL, Deployment
from tests.pipeline.test_openai_client import ANSWER

GREEDY = {"temperature": 0}  # the package's newest versions have no such argument
QUESTION: list[Any] = [{"role": "user", "content": "What is Penstock?"}]
BLOCKS: list[Any] = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "What is ", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Penstock?"},
        ],
    }
]


@pytest.fixture(scope="module")
def client(demo: Deployment) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=demo.url(), api_key="any", max_retries=0, timeout=120) as client:
        yield client


def ask(client: anthropic.Anthropic, **more: Any) -> Any:
    extra = GREEDY | more.pop("extra_body", {})
    return client.messages.create(
        **({"model": MODEL, "messages": QUESTION, "max_tokens": 100} | more), extra_body=extra
    )


@pytest.mark.parametrize("messages", [QUESTION, BLOCKS])
def test_a_message_is_answered_as_the_chat_is(client: anthropic.Anthropic, messages: Any) -> None:
    reply = ask(client, messages=messages, metadata={"user_id": "me"})
    assert [(block.type, block.text) for block in reply.content] == [("text", ANSWER)]
    assert (reply.role, reply.stop_reason, reply.stop_sequence, reply.model) == ("assistant", "end_turn", None, MODEL)
    assert reply.usage.input_tokens + reply.usage.cache_read_input_tokens == 7 and reply.usage.output_tokens == 37


def test_a_stream_has_the_events_in_order(client: anthropic.Anthropic) -> None:
    events = list(ask(client, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"] and kinds[-3:] == [
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert "".join(event.delta.text for event in events[2:-3]) == ANSWER
    assert events[0].message.usage.input_tokens + events[0].message.usage.cache_read_input_tokens == 7
    assert events[-2].delta.stop_reason == "end_turn" and events[-2].usage.output_tokens == 37


def test_the_package_s_own_helper_reads_the_stream(client: anthropic.Anthropic) -> None:
    with client.messages.stream(model=MODEL, messages=QUESTION, max_tokens=100, extra_body=GREEDY) as stream:
        assert "".join(stream.text_stream) == ANSWER
        assert stream.get_final_message().content[0].text == ANSWER


def test_the_async_client_gets_the_same(demo: Deployment) -> None:
    async def run() -> str:
        async with anthropic.AsyncAnthropic(base_url=demo.url(), api_key="any", max_retries=0, timeout=120) as client:
            reply = await client.messages.create(model=MODEL, messages=QUESTION, max_tokens=100, extra_body=GREEDY)
            return str(reply.content[0].text)

    assert asyncio.run(run()) == ANSWER


def test_stop_reasons_are_anthropic_s(client: anthropic.Anthropic) -> None:
    assert ask(client, max_tokens=3).stop_reason == "max_tokens"
    stopped = ask(client, stop_sequences=["pipeline of", "xyz"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "pipeline of")
    assert stopped.content[0].text == ANSWER.partition("pipeline of")[0]


TOOL: Any = {
    "name": "weather",
    "input_schema": {
        "type": "object",
        "properties": {
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["unit", "days"],
    },
}


def test_a_tool_that_must_be_used_is_used_whole_and_streamed_alike(client: anthropic.Anthropic) -> None:
    asked: Any = {"tools": [TOOL], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "max_tokens": 300}
    extra = {"temperature": 1.3, "seed": 2}
    reply = ask(client, **asked, extra_body=extra)
    with client.messages.stream(model=MODEL, messages=QUESTION, **asked, extra_body=extra) as stream:
        streamed = stream.get_final_message()
    for [block], reason in ((reply.content, reply.stop_reason), (streamed.content, streamed.stop_reason)):
        assert (block.type, block.name, reason) == ("tool_use", "weather", "tool_use") and block.input == reply.content[
            0
        ].input
        jsonschema.validate(block.input, TOOL["input_schema"])
    result = {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": reply.content[0].id, "content": "rain"}],
    }
    messages = [*QUESTION, {"role": "assistant", "content": reply.content}, result]
    counted = client.messages.count_tokens(model=MODEL, messages=messages, tools=[TOOL])
    usage = ask(client, messages=messages, tools=[TOOL], max_tokens=1).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_a_format_and_a_message_that_is_begun_are_the_chat_s(client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"is_pipe": {"type": "boolean"}},
        "required": ["is_pipe"],
        "additionalProperties": False,
    }
    form = {"output_config": {"format": {"type": "json_schema", "schema": schema}}, "temperature": 1.3, "seed": 1}
    jsonschema.validate(json.loads(ask(client, extra_body=form, max_tokens=200).content[0].text), schema)
    begun = ANSWER[: ANSWER.index(" ", 40)]
    reply = ask(client, messages=[*QUESTION, {"role": "assistant", "content": begun}])
    assert begun + reply.content[0].text == ANSWER


def test_a_system_prompt_and_a_conversation_are_the_chat_s(demo: Deployment, client: anthropic.Anthropic) -> None:
    first = ask(client)
    messages = [*QUESTION, {"role": "assistant", "content": first.content}, {"role": "user", "content": "And then?"}]
    reply = ask(client, messages=messages, system=[{"type": "text", "text": "Be brief."}], max_tokens=8)
    chat = [
        {"role": "system", "content": "Be brief."},
        *QUESTION,
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "And then?"},
    ]
    same = demo.client().chat.completions.create(model=MODEL, messages=chat, temperature=0, max_tokens=8)
    assert reply.content[0].text == same.choices[0].message.content
    counted = client.messages.count_tokens(model=MODEL, messages=messages, system="Be brief.")
    turns = [{"role": "user", "content": text} for text in ("One.", "Two.")]
    joined = [{"role": "user", "content": "One.\n\nTwo."}]
    assert client.messages.count_tokens(model=MODEL, messages=turns) == client.messages.count_tokens(
        model=MODEL, messages=joined
    )
    assert (
        counted.input_tokens
        == same.usage.prompt_tokens
        == reply.usage.input_tokens + reply.usage.cache_read_input_tokens
    )


@pytest.mark.parametrize(
    ("more", "name"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            r"messages\[0\]\.content\[0\]\.source\.type",
        ),
        ({"extra_body": {"temperature": 1000}}, "temperature"),
        (
            {"tools": [{"type": "web_search_20250305", "name": "web_search"}], "tool_choice": {"type": "any"}},
            "tool_choice",
        ),
        ({"extra_body": {"stop_sequences": 5}}, "stop_sequences"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "tokens"),
    ],
)
def test_what_is_wrong_is_named_in_anthropic_s_shape(
    client: anthropic.Anthropic, more: dict[str, Any], name: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=name) as caught:
        ask(client, **more)
    assert caught.value.body["type"] == "error" and caught.value.body["error"]["type"] == "invalid_request_error"


def test_other_errors_have_the_shape_too(demo: Deployment, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        ask(client, model="nobody")
    assert (
        caught.value.body["error"]["type"] == "not_found_error"
        and caught.value.request_id == caught.value.response.headers["X-Request-Id"]
    )
    wrong = httpx.post(demo.url() + "/v1/messages", content=b"{", timeout=10, trust_env=False)
    assert (wrong.status_code, wrong.json()["type"]) == (400, "error")


def test_models_are_listed_in_anthropic_s_shape(demo: Deployment, client: anthropic.Anthropic) -> None:
    """OpenAI has the same path: who sends anthropic-version gets this shape, and everybody else OpenAI's."""
    [card] = client.models.list(limit=1)
    assert (card.type, card.id, card.display_name, card.lifecycle) == ("model", MODEL, MODEL, "active")
    assert card == client.models.retrieve(MODEL) and card.created_at.year >= 2024
    page = client.models.list()
    assert (page.first_id, page.last_id, page.has_more) == (MODEL, MODEL, False)
    assert (
        card.max_input_tokens == demo.get(f"/v1/models/{MODEL}").json()["max_model_len"]
        and demo.get("/v1/models").json()["object"] == "list"
    )
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.models.retrieve("nobody")
    assert caught.value.body["error"]["type"] == "not_found_error" and caught.value.request_id
    assert demo.get("/v1/models/nobody").json()["error"]["code"] == "model_not_found"
