"""The Responses API as the `openai` package speaks it, against a real pipeline."""

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from shared.wire.streams import LOG_TTL_S, log_key, stored_key
from tests.deployment import MODEL, Deployment
from tests.pipeline.test_openai_client import ANSWER
from tests.waiting import wait_until

QUESTION = "What is Penstock?"
ITEM = {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}
TEXT_EVENTS = ["response.output_item.added", "response.content_part.added"]
LAST_EVENTS = [
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


@pytest.fixture(scope="module")
def client(demo: Deployment) -> Iterator[openai.OpenAI]:
    with demo.client() as client:
        yield client


def ask(client: openai.OpenAI, **more: Any) -> Any:
    return client.responses.create(**({"model": MODEL, "input": QUESTION, "temperature": 0} | more))


def finished(client: openai.OpenAI, response_id: str) -> Any:
    """The background response, once it has ended."""

    def look() -> Any:
        response = client.responses.retrieve(response_id)
        return response if response.status not in ("queued", "in_progress") else None

    return wait_until(look, description="the response has ended", timeout_s=60)


@pytest.mark.parametrize("given", [QUESTION, [ITEM], [{"type": "message", "role": "user", "content": QUESTION}]])
def test_an_input_of_any_form_is_answered_as_the_chat_is(client: openai.OpenAI, given: Any) -> None:
    response = ask(client, input=given, metadata={"k": "v"}, user="me")
    assert response.output_text == ANSWER
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (7, 37, 44)
    assert (response.metadata, response.user, response.temperature, response.store) == ({"k": "v"}, "me", 0, True)
    (message,) = response.output
    assert (message.type, message.role, message.status) == ("message", "assistant", "completed")


def test_a_stream_has_openai_s_events_numbered_from_zero(client: openai.OpenAI) -> None:
    events = list(ask(client, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == ["response.created", "response.in_progress", *TEXT_EVENTS]
    assert set(kinds[4:-4]) == {"response.output_text.delta"} and kinds[-4:] == LAST_EVENTS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events[4:-4]) == ANSWER == events[-4].text
    assert events[-1].response.output_text == ANSWER
    assert events[0].response.output == [] and events[0].response.status == "in_progress"


def test_the_package_s_own_helper_reads_the_stream(client: openai.OpenAI) -> None:
    with client.responses.stream(model=MODEL, input=QUESTION, temperature=0) as stream:
        deltas = [event.snapshot for event in stream if event.type == "response.output_text.delta"]
        assert deltas[-1] == ANSWER
        assert stream.get_final_response().output_text == ANSWER


def test_the_async_client_gets_the_same(demo: Deployment) -> None:
    async def run() -> tuple[str, str]:
        async with demo.async_client() as client:
            whole = await client.responses.create(model=MODEL, input=QUESTION, temperature=0)
            stream = await client.responses.create(model=MODEL, input=QUESTION, temperature=0, stream=True)
            return whole.output_text, "".join(
                [event.delta async for event in stream if event.type == "response.output_text.delta"]
            )

    assert asyncio.run(run()) == (ANSWER, ANSWER)


def test_a_stored_response_is_read_again_with_every_event_under_its_number(client: openai.OpenAI) -> None:
    events = [event.to_dict() for event in ask(client, stream=True)]
    response_id = events[0]["response"]["id"]
    for after in (None, 0, 1, 7, len(events) - 2, len(events) - 1, 10_000):
        more = {} if after is None else {"starting_after": after}
        again = [event.to_dict() for event in client.responses.retrieve(response_id, stream=True, **more)]
        assert again == events[(after if after is not None else -1) + 1 :], after
    assert client.responses.retrieve(response_id).to_dict() == events[-1]["response"]
    assert ask(client, store=False).output_text == ANSWER


def test_a_conversation_goes_on_from_the_response_before(client: openai.OpenAI) -> None:
    first = ask(client, instructions="Be brief.")
    second = ask(client, input="And then?", previous_response_id=first.id, max_output_tokens=8)
    messages = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": ANSWER},
        {"role": "user", "content": "And then?"},
    ]
    chat = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=8)
    assert second.output_text == chat.choices[0].message.content
    assert (second.status, second.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert second.usage.input_tokens == chat.usage.prompt_tokens  # the instructions before are not carried over
    third = ask(
        client, input=[*first.output, {"role": "user", "content": "And then?"}], max_output_tokens=3
    )  # what we sent comes back
    assert third.output_text

    items = client.responses.input_items.list(second.id, order="asc").data
    assert [item.role for item in items] == ["user", "assistant", "user"] and items[1].content[0].text == ANSWER
    page = client.responses.input_items.list(second.id, limit=1)
    assert page.data[0].content[0].text == "And then?" and page.has_more
    assert [item.role for item in page] == ["user", "assistant", "user"]


def test_a_background_response_runs_by_itself(client: openai.OpenAI) -> None:
    response = ask(client, background=True)
    assert (response.status, response.output, response.background) == ("queued", [], True)
    done = finished(client, response.id)
    assert (done.status, done.output_text) == ("completed", ANSWER)
    assert client.responses.cancel(response.id).status == "completed"


def test_a_background_stream_can_be_left_and_read_on_by_many(client: openai.OpenAI) -> None:
    stream = ask(client, background=True, stream=True)
    begun = [next(stream).to_dict() for _ in range(5)]
    stream.close()
    assert [event["type"] for event in begun[:3]] == ["response.created", "response.queued", "response.in_progress"]
    response_id = begun[0]["response"]["id"]
    readers = [
        client.responses.retrieve(response_id, stream=True, starting_after=begun[-1]["sequence_number"])
        for _ in range(3)
    ]
    rest = [[event.to_dict() for event in reader] for reader in readers]
    assert rest[0] == rest[1] == rest[2]
    events = begun + rest[0]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ANSWER


def test_cancelling_ends_a_background_response_at_once_and_for_all_readers(client: openai.OpenAI) -> None:
    stream = ask(
        client, background=True, stream=True, max_output_tokens=1000, temperature=1, extra_body={"ignore_eos": True}
    )  # it is never as long
    response_id = next(stream).response.id
    cancelled = client.responses.cancel(response_id)
    assert cancelled.status == "cancelled"
    last = list(stream)[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    assert client.responses.retrieve(response_id).status == "cancelled"
    with pytest.raises(openai.BadRequestError, match="background=true"):
        client.responses.cancel(ask(client).id)


def test_what_is_deleted_is_gone(demo: Deployment, client: openai.OpenAI) -> None:
    response = ask(client)
    with demo.redis() as redis:
        assert 0 < redis.ttl(stored_key(response.id)) <= LOG_TTL_S
        client.responses.delete(response.id)
        assert not redis.exists(stored_key(response.id)) and redis.ttl(log_key(f"{response.id}.0")) <= 60
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            call(response.id)
    unstored = ask(client, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


def test_a_background_response_that_fails_says_why(client: openai.OpenAI) -> None:
    response = ask(client, background=True, input="word " * 3000)
    done = finished(client, response.id)
    assert (done.status, done.error.code) == ("failed", "invalid_prompt") and done.error.param == "input"
    events = list(client.responses.retrieve(response.id, stream=True))
    assert [event.type for event in events] == [
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.failed",
    ]
    with pytest.raises(openai.BadRequestError, match="failed"):
        ask(client, previous_response_id=response.id)


def test_logprobs_are_included_where_they_are_asked_for(client: openai.OpenAI) -> None:
    response = ask(client, include=["message.output_text.logprobs"], top_logprobs=2, max_output_tokens=4)
    logprobs = response.output[0].content[0].logprobs
    assert "".join(entry.token for entry in logprobs) == response.output_text
    assert all(len(entry.top_logprobs) == 2 for entry in logprobs)
    assert ask(client).output[0].content[0].logprobs == []


def test_input_tokens_are_counted_without_computing(client: openai.OpenAI) -> None:
    first = ask(client)
    counted = client.responses.input_tokens.count(model=MODEL, input="And then?", previous_response_id=first.id)
    second = ask(client, input="And then?", previous_response_id=first.id, max_output_tokens=1)
    assert counted.input_tokens == second.usage.input_tokens


class Pipe(BaseModel):
    """A pipe."""

    kind: Literal["penstock", "drain"]
    length: int = Field(ge=1, le=99)


def test_a_text_and_arguments_are_parsed_by_the_package(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": QUESTION, "temperature": 1.2, "max_output_tokens": 300}
    parsed = client.responses.parse(**asked, text_format=Pipe, extra_body={"seed": 3}).output_parsed
    assert isinstance(parsed, Pipe)
    asked |= {
        "tools": [openai.pydantic_function_tool(Pipe)["function"] | {"type": "function"}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    events = list(client.responses.create(**asked, stream=True, extra_body={"seed": 4}))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    [call] = events[-1].response.output
    assert (call.type, call.name, call.status) == ("function_call", "Pipe", "completed")
    assert (
        "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
        == call.arguments
    )
    Pipe.model_validate_json(call.arguments)
    again = client.responses.retrieve(events[-1].response.id, stream=True, starting_after=3)
    assert [event.to_dict() for event in again] == [event.to_dict() for event in events[4:]]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "ok"}
    told = ask(client, input=[output], previous_response_id=events[-1].response.id, max_output_tokens=3)
    assert told.output_text
    background = finished(client, client.responses.create(**asked, background=True, extra_body={"seed": 4}).id)
    assert background.output[0].arguments == call.arguments


def test_a_seed_makes_the_same_answer(client: openai.OpenAI) -> None:
    answers = {ask(client, temperature=1.5, max_output_tokens=20, extra_body={"seed": 7}).output_text for _ in range(2)}
    assert len(answers) == 1


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
            "input[0].content[0].type",
        ),
        ({"input": [{"type": "image_generation_call", "id": "x"}]}, "input"),
        ({"temperature": 1000}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"truncation": "middle"}, "truncation"),
        ({"input": "word " * 3000}, "input"),
        ({"input": "word " * 3000, "stream": True}, "input"),
        ({"background": True, "store": False}, "store"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
        ({"extra_body": {"parallel_tool_calls": "yes"}}, "parallel_tool_calls"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
    ],
)
def test_what_is_wrong_is_named(client: openai.OpenAI, more: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **more)
    assert caught.value.param == param, caught.value.message


def test_a_response_is_no_stream_of_the_chat_api(demo: Deployment, client: openai.OpenAI) -> None:
    reply = demo.get(f"/v1/streams/{ask(client).id}")
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "response_of_another_api")


def test_an_item_that_is_stored_may_be_named(client: openai.OpenAI) -> None:
    first = ask(client, input=[ITEM])
    [asked] = client.responses.input_items.list(first.id).data
    named: Any = [
        {"type": "item_reference", "id": asked.id},
        {"type": "item_reference", "id": first.output[0].id},
        ITEM,
    ]
    told: Any = [ITEM, {"role": "assistant", "content": ANSWER}, ITEM]
    again = ask(client, input=named)
    assert again.usage.input_tokens == ask(client, input=told).usage.input_tokens > first.usage.input_tokens
    assert [item.type for item in client.responses.input_items.list(again.id).data] == ["message"] * 3
    for wrong in ("msg_1", first.output[0].id[:-1] + "7", "msg_" + "0" * 32 + "_0"):
        with pytest.raises(openai.APIStatusError, match="not found") as error:
            ask(client, input=[ITEM, {"type": "item_reference", "id": wrong}])
        assert error.value.response.json()["error"]["param"] == "input[1].id"


def test_what_is_too_long_is_cut_at_its_beginning_if_that_is_asked_for(client: openai.OpenAI) -> None:
    turns: list[Any] = [
        {"role": role, "content": f"{number} " + "word " * 40} for number in range(20) for role in ("user", "assistant")
    ]
    with pytest.raises(openai.BadRequestError) as error:
        ask(client, input=[*turns, ITEM])
    assert error.value.code == "context_length_exceeded"
    cut = ask(client, input=[*turns, ITEM], truncation="auto", instructions="Be brief.", max_output_tokens=100)
    assert cut.truncation == "auto" and cut.output_text and 700 < cut.usage.input_tokens <= 924
    whole = ask(client, input=[ITEM], truncation="auto")
    assert whole.output_text == ANSWER and whole.usage.input_tokens == 7
    with pytest.raises(openai.BadRequestError) as still:
        ask(client, input="word " * 3000, truncation="auto")
    assert still.value.code == "context_length_exceeded"
