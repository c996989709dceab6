"""The packages of the APIs' own makers: `openai` (sync, async, parse, tools, Responses),
`anthropic`, `ollama`. As frameworks.py.
"""

import asyncio
from typing import Any

from tests.clients.documented import names_of
from tests.clients.frameworks import ANSWER, MODEL, QUESTION, Forecast

MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
SCHEMA = Forecast.model_json_schema() | {"additionalProperties": False}


def openai(url: str) -> None:
    import openai as library

    with names_of("openai", url, MODEL)["client"] as client:
        asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 120}
        whole = client.chat.completions.create(**asked)
        assert (whole.choices[0].message.content or "").startswith(ANSWER) and whole.choices[
            0
        ].finish_reason == "stop", whole
        with client.chat.completions.stream(**asked) as stream:
            kinds = {event.type for event in stream}
            assert stream.get_final_completion().choices[0].message.content == whole.choices[0].message.content
        assert {"content.delta", "content.done"} <= kinds, kinds
        parsed = (
            client.chat.completions.parse(**asked | {"max_tokens": 400}, response_format=Forecast)
            .choices[0]
            .message.parsed
        )
        assert isinstance(parsed, Forecast), parsed
        tool = library.pydantic_function_tool(Forecast)
        called = (
            client.chat.completions.parse(**asked, tools=[tool], tool_choice="required", parallel_tool_calls=False)
            .choices[0]
            .message
        )
        [call] = called.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Forecast), call
        answered = [*MESSAGES, called, {"role": "tool", "tool_call_id": call.id, "content": "rain"}]
        assert client.chat.completions.create(**asked | {"messages": answered, "max_tokens": 5}).usage is not None
        assert (
            client.completions.create(model=MODEL, prompt="The", max_tokens=3, logprobs=2).choices[0].logprobs
            is not None
        )
        assert client.models.retrieve(MODEL).id in [model.id for model in client.models.list()]
        assert len(client.embeddings.create(model=MODEL, input=["a", "b"]).data) == 2
        try:
            client.chat.completions.create(**asked | {"temperature": -1})
        except library.BadRequestError as error:
            assert error.param == "temperature", error
        else:
            raise AssertionError("a temperature below 0 was taken")


def openai_async(url: str) -> None:
    import openai as library

    async def run() -> None:
        async with library.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:

            async def ask() -> str:
                stream = await client.chat.completions.create(
                    model=MODEL, messages=MESSAGES, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            texts = await asyncio.gather(*(ask() for _ in range(8)))
            assert len(set(texts)) == 1 and texts[0].startswith(ANSWER), texts

    asyncio.run(run())


def openai_responses(url: str) -> None:
    with names_of("openai", url, MODEL)["client"] as client:
        first = client.responses.create(model=MODEL, input=QUESTION, temperature=0)
        assert first.output_text.startswith(ANSWER) and first.status == "completed", first
        second = client.responses.create(
            model=MODEL, input="And then?", previous_response_id=first.id, max_output_tokens=16
        )
        assert second.previous_response_id == first.id and second.status in ("completed", "incomplete"), second
        parsed = client.responses.parse(model=MODEL, input=QUESTION, text_format=Forecast, temperature=0).output_parsed
        assert isinstance(parsed, Forecast), parsed
        tool: Any = {"type": "function", "name": "forecast", "parameters": SCHEMA, "strict": True}
        called = client.responses.create(
            model=MODEL, input=QUESTION, tools=[tool], tool_choice="required", parallel_tool_calls=False
        )
        assert [item.type for item in called.output] == ["function_call"], called
        running = client.responses.create(model=MODEL, input=QUESTION, temperature=0, background=True, stream=True)
        begun = [next(running) for _ in range(6)]
        running.close()
        rest = client.responses.retrieve(begun[0].response.id, stream=True, starting_after=begun[-1].sequence_number)
        events = [*begun, *rest]
        assert [event.sequence_number for event in events] == list(range(len(events))) and events[
            -1
        ].type == "response.completed", events[-1]
        assert client.responses.retrieve(begun[0].response.id).output_text == first.output_text


def anthropic(url: str) -> None:
    with names_of("anthropic", url, MODEL)["client"] as client:
        asked: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": 120,
            "messages": MESSAGES,
            "extra_body": {"temperature": 0},
        }
        [block] = client.messages.create(**asked).content
        assert block.text.startswith(ANSWER), block
        with client.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == block.text
            assert stream.get_final_message().stop_reason == "end_turn"
        tool = {"name": "forecast", "description": "The weather to come.", "input_schema": SCHEMA}
        [call] = client.messages.create(**asked, tools=[tool], tool_choice={"type": "tool", "name": "forecast"}).content
        assert call.type == "tool_use" and Forecast(**call.input), call
        assert client.messages.count_tokens(model=MODEL, messages=MESSAGES).input_tokens > 0


def ollama(url: str) -> None:
    client = names_of("ollama", url, MODEL)["client"]
    asked: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "options": {"temperature": 0}}
    whole = client.chat(**asked).message.content or ""
    assert whole.startswith(ANSWER), whole
    assert "".join(part.message.content or "" for part in client.chat(**asked, stream=True)) == whole
    assert Forecast.model_validate_json(client.chat(**asked, format=SCHEMA).message.content or "")
    assert client.generate(model=MODEL, prompt=QUESTION, options={"num_predict": 3}).eval_count == 3
    assert len(client.embed(model=MODEL, input=["a", "b"]).embeddings) == 2
    assert MODEL in [(model.model or "").removesuffix(":latest") for model in client.list().models]
