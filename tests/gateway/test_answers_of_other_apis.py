"""Thoughts and calls of a model that has them, as the packages of the other APIs read them, over
real gateways: whole and streamed alike.
"""

import json
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from services.requests.text.answers.sse import DONE
from shared.wire.messages import RequestError
from tests.deployment import Deployment
from tests.gateway.backstage import NAME, Backstage
from tests.gateway.test_answers import ADD, CALLS, LOOK, TEXTS, answering

QUESTION: list[Any] = [{"role": "user", "content": "Hi"}]
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
ASKED: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": QUESTION, "max_tokens": 9},
    "/api/chat": {"messages": QUESTION},
    "/api/generate": {"prompt": "Hi"},
}
INPUTS = [(name, json.loads(arguments)) for name, arguments in CALLS]
FLAT: list[Any] = [{"type": "function"} | tool["function"] for tool in (ADD, LOOK)]  # as in Responses
BLOCKS = [
    {"name": tool["function"]["name"], "input_schema": tool["function"].get("parameters", {"type": "object"})}
    for tool in (ADD, LOOK)
]


def test_responses_have_items_of_reasoning_text_and_calls(thinking_stage: tuple[Deployment, Backstage]) -> None:
    deployment, backstage = thinking_stage
    asked: dict[str, Any] = {"model": NAME, "input": "Hi", "tools": FLAT, "reasoning": {"effort": "low"}}
    with deployment.client() as client:
        thread, taken = answering(backstage, TEXTS)
        events = list(client.responses.create(**asked, stream=True))
        thread.join()
        assert [(type(event).__name__, event.sequence_number) for event in events][-1] == (
            "ResponseCompletedEvent",
            len(events) - 1,
        )
        whole = events[-1].response
        assert [item.type for item in whole.output] == ["reasoning", "message", "function_call", "function_call"]
        assert whole.output[0].content[0].text == "Let me see." and whole.output_text == "I add."
        assert [(item.name, item.arguments) for item in whole.output[2:]] == CALLS
        assert whole.usage.output_tokens_details.reasoning_tokens == 4 and whole.tools[0].name == "add"
        deltas = [
            (event.output_index, event.delta)
            for event in events
            if event.type == "response.function_call_arguments.delta"
        ]
        assert deltas == [(2, '{"a": '), (2, '12, "b": "x\\n'), (2, '"}'), (3, "{}")]
        assert json.loads(taken[0].chat.tools) == [ADD, LOOK] and json.loads(taken[0].chat.template_kwargs) == {
            "reasoning_effort": "low"
        }

        with deployment.client(
            "gateway-2"
        ) as other:  # the log says the same to whoever reads it: items, numbers and ids
            for after in range(-1, len(events), 5):
                again = other.responses.retrieve(
                    whole.id, stream=True, **({} if after < 0 else {"starting_after": after})
                )
                assert [event.to_dict() for event in again] == [event.to_dict() for event in events[after + 1 :]], after
            outputs = [
                {"type": "function_call_output", "call_id": item.call_id, "output": "13"} for item in whole.output[2:]
            ]
            thread, taken = answering(backstage, ["ok"])
            reply = other.responses.create(**asked | {"input": outputs}, previous_response_id=whole.id)
            thread.join()
        assert reply.output_text == "ok"
        said, *told = [message for message in taken[0].messages or () if message.role in ("assistant", "tool")]
        assert (said.reasoning, said.content, [(call.name, call.arguments) for call in said.tool_calls]) == (
            "Let me see.",
            "I add.",
            CALLS,
        )
        assert [message.tool_call_id for message in told] == [call.call_id for call in said.tool_calls]


def num_in_background(deployment: Deployment) -> float:
    lines = deployment.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("penstock_background_responses_total"))


def test_a_background_response_is_counted_and_parsed_from_its_log(thinking_stage: tuple[Deployment, Backstage]) -> None:
    deployment, backstage = thinking_stage
    num_before = num_in_background(deployment)
    with deployment.client() as client:
        response = client.responses.create(model=NAME, input="Hi", tools=FLAT, background=True)
        [request] = backstage.take()
        backstage.write_texts(request, TEXTS)
        done = client.responses.retrieve(response.id)
        assert (
            request.gateway_id is None
            and done.status == "completed"
            and num_in_background(deployment) == num_before + 1
        )
        assert [(item.name, item.arguments) for item in done.output if item.type == "function_call"] == CALLS


def test_messages_have_blocks_of_thinking_text_and_tool_use(thinking_stage: tuple[Deployment, Backstage]) -> None:
    deployment, backstage = thinking_stage
    asked: dict[str, Any] = {
        "model": NAME,
        "max_tokens": 100,
        "messages": QUESTION,
        "tools": BLOCKS,
        "thinking": {"type": "enabled", "budget_tokens": 1024},
    }
    with anthropic.Anthropic(base_url=deployment.url(), api_key="any", max_retries=0, timeout=60) as client:
        thread, taken = answering(backstage, TEXTS)
        reply = client.messages.create(**asked)
        thread.join()
        thinking, said, *calls = reply.content
        assert (thinking.thinking, said.text, reply.stop_reason) == ("Let me see.", "I add.", "tool_use")
        assert [(call.name, call.input) for call in calls] == INPUTS
        assert json.loads(taken[0].chat.template_kwargs) == {"enable_thinking": True, "thinking": True}
        assert [tool["function"]["name"] for tool in json.loads(taken[0].chat.tools)] == ["add", "look"]

        thread, _ = answering(backstage, TEXTS)
        with client.messages.stream(**asked) as stream:
            kinds = [event.type for event in stream]
            streamed = stream.get_final_message()
        thread.join()
        assert [(block.type, getattr(block, "input", None)) for block in streamed.content] == [
            ("thinking", None),
            ("text", None),
            ("tool_use", INPUTS[0][1]),
            ("tool_use", {}),
        ]
        assert streamed.stop_reason == "tool_use" and kinds.count("content_block_stop") == 4

        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "13"} for call in calls]
        thread, taken = answering(backstage, ["ok"])
        messages = [*QUESTION, {"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
        assert (
            client.messages.create(**asked | {"messages": messages, "tool_choice": {"type": "none"}}).content[0].text
            == "ok"
        )
        thread.join()
        assert taken[0].chat.tools == "" and [message.role for message in taken[0].messages or ()] == [
            "user",
            "assistant",
            "tool",
            "tool",
        ]
        assert [(call.name, json.loads(call.arguments)) for call in (taken[0].messages or ())[1].tool_calls] == INPUTS


def test_ollama_s_messages_have_thinking_and_whole_calls(thinking_stage: tuple[Deployment, Backstage]) -> None:
    deployment, backstage = thinking_stage
    asked: dict[str, Any] = {"model": NAME, "messages": QUESTION, "tools": [ADD, LOOK]}
    with ollama.Client(host=deployment.url(), trust_env=False) as client:
        thread, taken = answering(backstage, TEXTS)
        reply = client.chat(**asked, think=True)
        thread.join()
        assert (reply.message.thinking, reply.message.content, reply.done_reason) == ("Let me see.", "I add.", "stop")
        assert [(call.function.name, call.function.arguments) for call in reply.message.tool_calls or ()] == INPUTS
        assert json.loads(taken[0].chat.template_kwargs) == {"enable_thinking": True, "thinking": True}

        thread, taken = answering(backstage, TEXTS)
        parts = list(client.chat(**asked, think=False, stream=True))
        thread.join()
        assert (
            "".join(part.message.thinking or "" for part in parts) == "Let me see."
            and "".join(part.message.content or "" for part in parts) == "I add."
        )
        assert [
            (call.function.name, call.function.arguments) for part in parts for call in part.message.tool_calls or ()
        ] == INPUTS
        assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
        assert json.loads(taken[0].chat.template_kwargs) == {"enable_thinking": False, "thinking": False}

        thread, taken = answering(backstage, ["<think>", "a</think>"])
        raw = client.generate(model=NAME, prompt="Hi", raw=True)
        thread.join()
        assert (
            (raw.response, raw.thinking) == ("<think>a</think>", None)
            and taken[0].prompt == "Hi"
            and taken[0].params.skip_special_tokens
        )
        assert client.show(NAME).capabilities == ["completion", "tools", "thinking"]


def test_a_raw_prompt_s_format_leaves_no_room_for_a_thought(thinking_stage: tuple[Deployment, Backstage]) -> None:
    """Nothing would tell the thought from the answer."""
    deployment, backstage = thinking_stage
    for is_raw in (True, False):
        thread, taken = answering(backstage, ['{"x": 1}'])
        httpx.post(
            deployment.url() + "/api/generate",
            json={"prompt": "Hi", "format": SCHEMA, "raw": is_raw},
            timeout=60,
            trust_env=False,
        )
        thread.join()
        found = taken[0].constraint
        assert found is not None and (found.thought_begin, found.thought_end) == (
            ("", "") if is_raw else ("<think>", "</think>")
        )


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/responses", {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}),
        ("/api/chat", {"format": SCHEMA}),
        ("/api/generate", {"format": SCHEMA}),
    ],
)
def test_a_format_is_the_answer_s_constraint(
    thinking_stage: tuple[Deployment, Backstage], path: str, field: dict[str, Any]
) -> None:
    deployment, backstage = thinking_stage
    thread, taken = answering(backstage, ['{"x": 1}'])
    body = {"model": NAME, "stream": False, **ASKED[path], **field}
    reply = httpx.post(deployment.url() + path, json=body, timeout=60, trust_env=False)
    thread.join()
    assert reply.status_code == 200 and '{\\"x\\": 1}' in reply.text
    constraint = taken[0].constraint
    assert constraint is not None and (constraint.kind, json.loads(constraint.text)) == (
        "json_schema",
        SCHEMA | {"additionalProperties": False},
    )


WRONG = {"type": "object", "properties": {"x": {"type": "nothing"}}}
NAMED = {"type": "function", "function": {"name": "f", "parameters": 3}}


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (
            "/v1/responses",
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": WRONG}}},
            "text.format.schema",
        ),
        ("/v1/responses", {"text": {"format": {"type": "yaml"}}}, "text.format.type"),
        ("/v1/responses", {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ("/v1/responses", {"tools": [FLAT[1], {"type": "function", "name": "a b"}]}, "tools[1].name"),
        ("/v1/responses", {"tools": FLAT, "tool_choice": {"type": "function", "name": 3}}, "tool_choice.name"),
        (
            "/v1/responses",
            {"tools": FLAT, "tool_choice": {"type": "allowed_tools", "mode": "all", "tools": [FLAT[1]]}},
            "tool_choice.mode",
        ),
        (
            "/v1/messages",
            {"output_config": {"format": {"type": "json_schema", "schema": WRONG}}},
            "output_config.format.schema",
        ),
        ("/v1/messages", {"tools": [{"name": "f", "input_schema": 3}]}, "tools[0].input_schema"),
        ("/v1/messages", {"tools": [{"name": 5, "input_schema": {}}]}, "tools[0].name"),
        ("/v1/messages", {"tools": BLOCKS, "tool_choice": {"type": "tool", "name": "nobody"}}, "tool_choice"),
        ("/v1/messages", {"thinking": {"type": "perhaps"}}, "thinking.type"),
        ("/api/chat", {"format": WRONG}, "format"),
        ("/api/chat", {"format": "yaml"}, "format"),
        ("/api/chat", {"tools": [NAMED]}, "tools[0].function.parameters"),
    ],
)
def test_what_is_wrong_is_named_as_the_api_names_it(
    thinking_stage: tuple[Deployment, Backstage], path: str, body: dict[str, Any], name: str
) -> None:
    reply = httpx.post(
        thinking_stage[0].url() + path, json={"model": NAME, **ASKED[path], **body}, timeout=60, trust_env=False
    )
    error = reply.json()["error"]
    assert reply.status_code == 400
    if path == "/v1/responses":
        assert error["param"] == name, error
    message = error if isinstance(error, str) else error["message"]
    assert name in message and "response_format" not in message, error
    assert thinking_stage[1].held() == 0


def test_a_tool_that_must_be_called_ends_a_message_as_tool_use(thinking_stage: tuple[Deployment, Backstage]) -> None:
    deployment, backstage = thinking_stage
    thread, taken = answering(backstage, ['{"a": 1, ', '"b": "x"}'])
    with anthropic.Anthropic(base_url=deployment.url(), api_key="any", max_retries=0, timeout=60) as client:
        choice: Any = {"type": "tool", "name": "add"}
        reply = client.messages.create(model=NAME, max_tokens=100, messages=QUESTION, tools=BLOCKS, tool_choice=choice)
    thread.join()
    [call] = reply.content
    assert (call.name, call.input, reply.stop_reason) == ("add", {"a": 1, "b": "x"}, "tool_use")
    assert taken[0].constraint is not None and taken[0].constraint.param == "tools"


def test_an_allowed_tool_of_responses_is_the_chat_s(thinking_stage: tuple[Deployment, Backstage]) -> None:
    deployment, backstage = thinking_stage
    thread, taken = answering(backstage, ['[{"name": "look", "parameters": {}}]'])
    choice: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]}
    with deployment.client() as client:
        reply = client.responses.create(
            model=NAME, input="Hi", tools=FLAT, tool_choice=choice, parallel_tool_calls=False
        )
    thread.join()
    assert [(item.type, item.name, item.arguments) for item in reply.output] == [("function_call", "look", "{}")]
    assert taken[0].constraint is not None and 'name\\": \\"add' not in taken[0].constraint.text


@pytest.mark.parametrize(
    ("path", "last"),
    [
        (
            "/v1/messages",
            b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"compute is gone"}}\n\n',
        ),
        ("/api/chat", b'{"error":"compute is gone"}\n'),
        ("/api/generate", b'{"error":"compute is gone"}\n'),
        (
            "/v1/chat/completions",
            b'data: {"error":{"message":"compute is gone","type":"unavailable_error","param":null,"code":"lost"}}\n\n'
            + DONE,
        ),
    ],
)
def test_an_error_in_a_stream_has_the_shape_of_its_api(
    thinking_stage: tuple[Deployment, Backstage], path: str, last: bytes
) -> None:
    deployment, backstage = thinking_stage
    body = {"model": NAME, "stream": True} | ASKED.get(path, {"messages": QUESTION})
    with httpx.stream("POST", deployment.url() + path, json=body, timeout=60, trust_env=False) as reply:
        [request] = backstage.take()
        backstage.write(request, 1, text="Hello")
        pieces = reply.iter_bytes()
        while b"Hello" not in next(pieces):
            pass
        backstage.end(request, error=RequestError("compute is gone", 503, code="lost"))
        assert b"".join(pieces).endswith(last)


def test_a_model_that_thinks_may_do_so_before_what_it_must_call(thinking_stage: tuple[Deployment, Backstage]) -> None:
    deployment, backstage = thinking_stage
    asked: dict[str, Any] = {
        "model": NAME,
        "messages": QUESTION,
        "tools": [ADD],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
    }
    with deployment.client() as client:
        thread, taken = answering(backstage, ["<think>Let me", " see.</th", "ink>\n\n", '{"a": 1, "b": "x"}'])
        message = client.chat.completions.create(**asked).choices[0].message
        thread.join()
        [call] = message.tool_calls or []
        assert (call.function.name, call.function.arguments, message.content) == ("add", '{"a": 1, "b": "x"}', None)
        assert message.model_extra is not None and message.model_extra["reasoning_content"] == "Let me see."
        constraint, template_kwargs = taken[0].constraint, taken[0].chat.template_kwargs
        assert constraint is not None and (constraint.thought_begin, constraint.thought_end, template_kwargs) == (
            "<think>",
            "</think>",
            "",
        )

        thread, taken = answering(backstage, ['{"a": 1, "b": "x"}'])
        client.chat.completions.create(**asked, reasoning_effort="none")
        thread.join()
        constraint = taken[0].constraint
        assert (
            constraint is not None
            and constraint.thought_end == ""
            and json.loads(taken[0].chat.template_kwargs)["enable_thinking"] is False
        )


def test_strict_functions_that_may_be_called_hold_the_call_to_their_schema(
    thinking_stage: tuple[Deployment, Backstage],
) -> None:
    deployment, backstage = thinking_stage
    tools: Any = [{"type": "function", "function": ADD["function"] | {"strict": True}}, LOOK]
    with deployment.client() as client:
        thread, taken = answering(backstage, TEXTS)
        reply = client.chat.completions.create(model=NAME, messages=QUESTION, tools=tools)
        thread.join()
        assert [
            (call.function.name, call.function.arguments) for call in reply.choices[0].message.tool_calls or []
        ] == CALLS
        constraint = taken[0].constraint
        assert (
            constraint is not None
            and constraint.kind == "structural_tag"
            and json.loads(constraint.text)["format"]["triggers"] == ["<tool_call>"]
        )
        impossible: Any = [
            {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object", "not": {}}}}
        ]
        with pytest.raises(openai.BadRequestError, match="the function f") as error:
            client.chat.completions.create(model=NAME, messages=QUESTION, tools=impossible)
        assert error.value.param == "tools[0].function.parameters"


def test_events_have_no_positions(thinking_stage: tuple[Deployment, Backstage]) -> None:
    deployment, backstage = thinking_stage
    thread, taken = answering(backstage, TEXTS)
    body = {"model": NAME, "max_tokens": 50, "messages": QUESTION, "tools": BLOCKS, "stream": True}
    reply = httpx.post(deployment.url() + "/v1/messages", json=body, timeout=60, trust_env=False)
    thread.join()
    assert "\nid: " not in reply.text and reply.text.startswith("event: message_start\n")
    resumed = deployment.get(f"/v1/streams/{taken[0].request_id.rpartition('.')[0]}")
    assert (resumed.status_code, resumed.json()["error"]["code"]) == (400, "response_of_another_api")
