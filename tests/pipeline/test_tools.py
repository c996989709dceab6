"""Tools and thoughts through the whole pipeline: what has to be called is called, by a model that
has never heard of tools.
"""

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.conftest import running_redis
from tests.deployment import MODEL, Deployment

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather at a place.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 12},
                "unit": {"$ref": "#/$defs/unit"},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "unit", "days"],
            "additionalProperties": False,
            "$defs": {"unit": {"enum": ["celsius", "fahrenheit"]}},
        },
    },
}
NOTHING: dict[str, Any] = {"type": "function", "function": {"name": "do_nothing"}}
ASKED: list[Any] = [{"role": "user", "content": "What is the weather?"}]
BODY: dict[str, Any] = {
    "model": MODEL,
    "messages": ASKED,
    "tools": [WEATHER, NOTHING],
    "temperature": 1.3,
    "max_tokens": 400,
}


def check(name: str, arguments: str) -> None:
    value = json.loads(arguments)
    if name == "do_nothing":
        assert value == {}
    else:
        assert name == "get_weather" and set(value) == {"city", "unit", "days"} and len(value["city"]) <= 12
        assert value["unit"] in ("celsius", "fahrenheit") and value["days"] in range(1, 10)


def put_together(stream: Any) -> tuple[list[tuple[str, str, str]], str]:
    calls: list[list[str]] = []
    finish = ""
    for chunk in stream:
        for entry in chunk.choices[0].delta.tool_calls or ():
            if entry.id:
                calls.append([entry.id, entry.function.name, ""])
            calls[entry.index][2] += entry.function.arguments
        finish = chunk.choices[0].finish_reason or finish
    return [(call_id, name, arguments) for call_id, name, arguments in calls], finish


@pytest.mark.parametrize("seed", range(2))
def test_a_required_call_comes_whole_and_streamed_alike(demo: Deployment, seed: int) -> None:
    client = demo.client()
    choice = client.chat.completions.create(
        **BODY, tool_choice="required", parallel_tool_calls=False, seed=seed
    ).choices[0]
    [call] = choice.message.tool_calls or []
    assert choice.message.content is None and choice.finish_reason == "tool_calls" and call.id.startswith("call_")
    check(call.function.name, call.function.arguments)
    streamed, finish = put_together(
        client.chat.completions.create(
            **BODY, tool_choice="required", parallel_tool_calls=False, seed=seed, stream=True
        )
    )
    assert [each[1:] for each in streamed] == [(call.function.name, call.function.arguments)] and finish == "tool_calls"


def test_several_calls_may_come_at_once(demo: Deployment) -> None:
    """This model does not stop calling by itself: the last call may be broken off."""
    reply = demo.client().chat.completions.create(**BODY | {"n": 2, "max_tokens": 150}, tool_choice="required", seed=3)
    for choice in reply.choices:
        calls = choice.message.tool_calls or []
        assert len(calls) > 1 and len({call.id for call in calls}) == len(calls)
        for call in calls if choice.finish_reason == "tool_calls" else calls[:-1]:
            check(call.function.name, call.function.arguments)


def test_a_named_call_is_made_and_the_conversation_goes_on(demo: Deployment) -> None:
    client = demo.client()
    named: Any = {"type": "function", "function": {"name": "get_weather"}}
    reply = client.chat.completions.create(**BODY, tool_choice=named, seed=1).choices[0]
    [call] = reply.message.tool_calls or []
    check("get_weather", call.function.arguments)
    assert call.function.name == "get_weather" and reply.finish_reason == "stop"
    messages = [
        *ASKED,
        reply.message,
        {"role": "tool", "tool_call_id": call.id, "content": "It rains."},
        {"role": "developer", "content": "Be brief."},
    ]
    answer = client.chat.completions.create(**BODY | {"messages": messages, "max_tokens": 5})
    assert answer.usage is not None and answer.usage.completion_tokens > 0


def test_an_allowed_tool_is_the_only_one(demo: Deployment) -> None:
    allowed: Any = {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "do_nothing"}}]},
    }
    reply = demo.client().chat.completions.create(**BODY, tool_choice=allowed, seed=1, parallel_tool_calls=False)
    assert [call.function.name for call in reply.choices[0].message.tool_calls or []] == ["do_nothing"]


class GetForecast(BaseModel):
    """The weather to come."""

    unit: Literal["celsius", "fahrenheit"]


def test_parse_gives_the_arguments_as_objects(demo: Deployment) -> None:
    client = demo.client()
    tool = openai.pydantic_function_tool(GetForecast)
    called = client.chat.completions.parse(
        model=MODEL,
        messages=ASKED,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=100,
        seed=2,
    )
    [call, *_] = called.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, GetForecast)


def test_the_async_client_streams_events_of_tools(demo: Deployment) -> None:
    async def run() -> set[str]:
        async with demo.async_client() as client:
            tool = openai.pydantic_function_tool(GetForecast)
            asked: Any = {"messages": ASKED, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
            async with client.chat.completions.stream(model=MODEL, **asked, max_tokens=100, seed=2) as stream:
                kinds: set[str] = {event.type async for event in stream}
                completion = await stream.get_final_completion()
            assert completion.choices[0].message.tool_calls
            return kinds

    kinds = asyncio.run(run())
    assert "tool_calls.function.arguments.delta" in kinds and "tool_calls.function.arguments.done" in kinds


def test_tools_that_are_offered_do_no_harm(demo: Deployment) -> None:
    """auto: the demo's answer is prose, and comes as it is."""
    client = demo.client()
    plain = client.chat.completions.create(**BODY | {"temperature": 0, "max_tokens": 30})
    streamed = client.chat.completions.create(**BODY | {"temperature": 0, "max_tokens": 30}, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == plain.choices[0].message.content
    assert plain.choices[0].message.tool_calls is None


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None) -> Iterator[Deployment]:
    """The demo, taken for a model that always thinks, with two samplers and two gateways."""
    folder = tmp_path_factory.mktemp("thinking")
    with running_redis(folder / "redis", redis_binary) as url:
        deployment = Deployment(url, folder)
        try:
            yield deployment.start_all(dtype="float32", reasoning_parser="deepseek_r1", samplers=2, gateways=2)
        finally:
            deployment.stop()


@pytest.mark.more
def test_a_thought_is_told_from_the_answer_and_survives_a_killed_sampler(thinking: Deployment) -> None:
    client = thinking.client()
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is Penstock?"}],
        "temperature": 0,
    }
    whole = client.chat.completions.create(**body)
    message = whole.choices[0].message
    assert message.content is None and message.model_extra is not None
    assert message.model_extra["reasoning_content"] == message.model_extra["reasoning"]
    assert message.model_extra["reasoning_content"].startswith("Penstock is a server for large language models.")
    assert whole.usage is not None and whole.usage.completion_tokens_details is not None
    assert whole.usage.completion_tokens_details.reasoning_tokens == whole.usage.completion_tokens
    again = client.chat.completions.create(
        **body | {"messages": [*body["messages"], message, {"role": "user", "content": "Why?"}], "max_tokens": 3}
    )
    assert again.choices[0].finish_reason == "length"
    long = body | {"max_tokens": 300, "stream": True, "stream_options": {"include_position": True}, "ignore_eos": True}
    url = thinking.url() + "/v1/chat/completions"
    expected = thoughts(httpx.post(url, json=long, timeout=120, trust_env=False).text)
    received = []
    with httpx.stream("POST", url, json=long, timeout=120, trust_env=False) as response:
        for line in response.iter_lines():
            received.append(line)
            if line == "id: 20":
                for sampler in [name for name in thinking.processes if name.startswith("sampler")][:1]:
                    thinking.processes[sampler].send_signal(signal.SIGKILL)
                    thinking.processes.pop(sampler).wait()
    assert thoughts("\n".join(received)) == expected


def test_a_search_tells_thoughts_from_answers(thinking: Deployment) -> None:
    """The answer of a search comes whole, and begins with what the template has opened."""
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is Penstock?"}],
        "temperature": 0,
        "max_tokens": 8,
    }
    plain = thinking.client().chat.completions.create(**asked)
    found = thinking.client().chat.completions.create(
        **asked, extra_body={"use_beam_search": True}
    )  # of one beam: the likeliest token each time
    assert (
        found.choices[0].message.content is None
        and found.choices[0].message.model_extra == plain.choices[0].message.model_extra
    )
    assert (
        found.usage is not None and found.usage.completion_tokens == 8 and found.usage.completion_tokens_details is None
    )


def thoughts(text: str) -> str:
    chunks = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("reasoning", "") for chunk in chunks for choice in chunk["choices"])


def test_a_forced_call_comes_behind_a_thought_or_at_once(thinking: Deployment) -> None:
    """This model does not know how to end a thought: it thinks as long as it may."""
    client = thinking.client()
    at_once = client.chat.completions.create(
        **BODY, tool_choice="required", parallel_tool_calls=False, seed=5, reasoning_effort="none"
    )
    [call] = at_once.choices[0].message.tool_calls or []
    check(call.function.name, call.function.arguments)
    assert "reasoning" not in (at_once.choices[0].message.model_extra or {})
    endless = client.chat.completions.create(**BODY | {"max_tokens": 20}, tool_choice="required", seed=5)
    assert endless.choices[0].finish_reason == "length" and endless.choices[0].message.tool_calls is None
    assert endless.choices[0].message.model_extra is not None and endless.choices[0].message.model_extra["reasoning"]
