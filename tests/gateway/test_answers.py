"""Answers that are parsed, over real gateways: streamed and whole alike, and from every position on the same."""

import json
import threading
from typing import Any

import httpx
import openai
import pytest

from services.requests.text.answers.sse import DONE
from shared.wire.messages import GenerateRequest, ToolCall
from tests.deployment import Deployment
from tests.gateway.backstage import NAME, Backstage

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}},
    },
}
LOOK = {"type": "function", "function": {"name": "look"}}
BODY: dict[str, Any] = {
    "model": NAME,
    "messages": [{"role": "user", "content": "Hi"}],
    "tools": [ADD, LOOK],
    "max_tokens": 100,
}
TEXTS = [
    *("<think>", "\n", "Let me", " see.", "</think>", "\n\n", "I ", "add. ", "<tool_call>"),
    *('\n{"name', '": "add", "argu', 'ments": {"a": 1', '2, "b": "x\\n', '"}}', "\n</tool", "_call>", "\n"),
    '<tool_call>{"name": "look", "arguments": {}}</tool_call>',
]
CALLS = [("add", '{"a": 12, "b": "x\\n"}'), ("look", "{}")]


def answering(backstage: Backstage, texts: list[str]) -> tuple[threading.Thread, list[GenerateRequest]]:
    """Answer the next request with these tokens."""
    taken: list[GenerateRequest] = []

    def answer() -> None:
        taken.extend(backstage.take())
        backstage.write_texts(taken[0], texts)

    thread = threading.Thread(target=answer)
    thread.start()
    return thread, taken


def events_of(text: str) -> list[tuple[str, Any]]:
    """The events of a stream: id and chunk."""
    found, event_id = [], ""
    for line in text.splitlines():
        if line.startswith("id: "):
            event_id = line.removeprefix("id: ")
        elif line.startswith("data: {"):
            found.append((event_id, json.loads(line.removeprefix("data: "))))
            event_id = ""
    return found


def deltas_of(events: list[tuple[str, Any]]) -> list[Any]:
    return [
        chunk["choices"][0]["delta"]
        for _, chunk in events
        if chunk["choices"] and "role" not in chunk["choices"][0]["delta"]
    ]


def put_together(deltas: list[Any]) -> tuple[str, str, list[tuple[str, str]]]:
    calls: list[list[str]] = []
    for delta in deltas:
        for entry in delta.get("tool_calls", ()):
            if "id" in entry:
                assert entry["index"] == len(calls) and entry["type"] == "function"
                calls.append([entry["function"]["name"], ""])
            calls[entry["index"]][1] += entry["function"]["arguments"]
    thoughts, content = ("".join(delta.get(name, "") for delta in deltas) for name in ("reasoning_content", "content"))
    return thoughts, content, [(name, arguments) for name, arguments in calls]


def test_a_stream_a_whole_answer_and_a_stream_resumed_anywhere_say_the_same(
    thinking_stage: tuple[Deployment, Backstage],
) -> None:
    deployment, backstage = thinking_stage
    thread, _ = answering(backstage, TEXTS)
    options = {"include_usage": True, "include_position": True, "include_obfuscation": False}
    streamed = httpx.post(
        deployment.url() + "/v1/chat/completions",
        json=BODY | {"stream": True, "stream_options": options},
        timeout=60,
        trust_env=False,
    )
    thread.join()
    events = events_of(streamed.text)
    assert put_together(deltas_of(events)) == ("Let me see.", "I add.", CALLS)
    assert [chunk["choices"][0]["finish_reason"] for _, chunk in events if chunk["choices"]][-1] == "tool_calls"
    assert events[-1][1]["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 19,
        "total_tokens": 22,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 4},
    }
    response_id = events[0][1]["id"]
    for position in range(20):
        headers = {"Last-Event-ID": str(position)} if position else {}
        again = httpx.get(
            deployment.url("gateway-2") + f"/v1/streams/{response_id}", headers=headers, timeout=60, trust_env=False
        )
        rest = [
            event
            for event in events
            if not event[0]
            or int(event[0]) > position
            or event[1]["choices"] == []
            or event[1]["choices"][0]["finish_reason"]
        ]
        rest = [event for event in rest if not position or event[0]]  # the opening is of the beginning
        assert events_of(again.text) == rest, position
        assert again.content.endswith(DONE)
    thread, _ = answering(backstage, TEXTS)
    whole = httpx.post(deployment.url() + "/v1/chat/completions", json=BODY, timeout=60, trust_env=False).json()
    thread.join()
    message = whole["choices"][0]["message"]
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == (
        "Let me see.",
        "Let me see.",
        "I add.",
    )
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]] == CALLS
    assert (
        whole["choices"][0]["finish_reason"] == "tool_calls"
        and whole["system_fingerprint"] == "fp_1"
        and whole["usage"] == events[-1][1]["usage"]
    )


def test_arguments_are_streamed_as_they_come_and_ids_stay(thinking_stage: tuple[Deployment, Backstage]) -> None:
    deployment, backstage = thinking_stage
    thread, taken = answering(backstage, TEXTS)
    stream = deployment.client().chat.completions.create(**BODY, stream=True)
    entries = [entry for chunk in stream for entry in chunk.choices[0].delta.tool_calls or ()]
    thread.join()
    assert [(entry.index, entry.function.name, entry.function.arguments) for entry in entries] == [
        (0, "add", '{"a": '),
        (0, None, '12, "b": "x\\n'),
        (0, None, '"}'),
        (1, "look", "{}"),
    ]
    assert entries[0].id != entries[3].id and entries[0].id.startswith("call_")
    response_id = taken[0].request_id.rpartition(".")[0]
    again = httpx.get(deployment.url("gateway-2") + f"/v1/streams/{response_id}", timeout=60, trust_env=False)
    ids = [
        entry["id"]
        for delta in deltas_of(events_of(again.text))
        for entry in delta.get("tool_calls", ())
        if "id" in entry
    ]
    assert ids == [entries[0].id, entries[3].id]


def test_what_the_request_says_reaches_the_tokenizer(thinking_stage: tuple[Deployment, Backstage]) -> None:
    deployment, backstage = thinking_stage
    thread, taken = answering(backstage, ["ok"])
    said = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
    }
    messages = [
        {"role": "developer", "content": "Be brief."},
        said,
        {"role": "tool", "tool_call_id": "c", "content": "nothing"},
    ]
    reply = deployment.client().chat.completions.create(
        **BODY | {"messages": messages}, reasoning_effort="low", extra_body={"include_reasoning": False}
    )
    thread.join()
    assert reply.choices[0].message.content == "ok" and "reasoning" not in reply.choices[0].message.model_extra
    [request] = taken
    assert request.messages is not None and [message.role for message in request.messages] == [
        "developer",
        "assistant",
        "tool",
    ]
    assert request.messages[1].tool_calls == (ToolCall("c", "look", "{}"),) and request.messages[2].tool_call_id == "c"
    assert json.loads(request.chat.tools) == [ADD, LOOK] and json.loads(request.chat.template_kwargs) == {
        "reasoning_effort": "low"
    }
    assert not request.params.skip_special_tokens and request.constraint is None


def test_no_tool_is_no_call_and_a_forced_one_is_its_arguments(thinking_stage: tuple[Deployment, Backstage]) -> None:
    deployment, backstage = thinking_stage
    client = deployment.client()
    thread, taken = answering(backstage, TEXTS)
    reply = client.chat.completions.create(**BODY, tool_choice="none")
    thread.join()
    assert (
        reply.choices[0].finish_reason == "stop"
        and reply.choices[0].message.content == "".join(TEXTS[6:])
        and reply.choices[0].message.tool_calls is None
    )
    assert taken[0].chat.tools == "" and taken[0].params.skip_special_tokens
    thread, taken = answering(backstage, ['{"a"', ": 1}"])
    reply = client.chat.completions.create(**BODY, tool_choice={"type": "function", "function": {"name": "add"}})
    thread.join()
    [call] = reply.choices[0].message.tool_calls
    assert (call.function.name, call.function.arguments, reply.choices[0].finish_reason) == ("add", '{"a": 1}', "stop")
    assert taken[0].constraint is not None and taken[0].constraint.kind == "structural_tag"
    thread, taken = answering(
        backstage, ['[{"name": "add", "para', 'meters": {"a": 1}}, {"name": "look", "parameters": {}}]']
    )
    reply = client.chat.completions.create(**BODY, tool_choice="required")
    thread.join()
    assert [call.function.name for call in reply.choices[0].message.tool_calls] == ["add", "look"] and reply.choices[
        0
    ].finish_reason == "tool_calls"


def test_thoughts_can_be_left_out_and_usage_can_be_continuous(thinking_stage: tuple[Deployment, Backstage]) -> None:
    deployment, backstage = thinking_stage
    thread, _ = answering(backstage, TEXTS[:8])
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = BODY | {"stream": True, "include_reasoning": False, "stream_options": options}
    events = events_of(
        httpx.post(deployment.url() + "/v1/chat/completions", json=body, timeout=60, trust_env=False).text
    )
    thread.join()
    assert put_together(deltas_of(events)) == ("", "I add. ", [])
    assert not any(event_id for event_id, _ in events), "nobody asked for positions"
    assert [chunk["usage"]["completion_tokens"] for _, chunk in events[1:]] == [7, 8, 9, 9, 9]
    assert {chunk["system_fingerprint"] for _, chunk in events} == {"fp_1"}


def test_the_browser_of_a_named_origin_may_read_and_another_s_may_not(
    thinking_stage: tuple[Deployment, Backstage],
) -> None:
    deployment, _ = thinking_stage
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    url = deployment.url() + "/v1/chat/completions"
    for origin, is_allowed in (
        ("https://chat.example", True),
        ("http://localhost:3000", True),
        ("https://evil.example", False),
    ):
        preflight = httpx.options(url, headers=asked | {"Origin": origin}, timeout=60, trust_env=False)
        assert preflight.status_code == (200 if is_allowed else 400)
        refused = httpx.post(url, json={}, headers={"Origin": origin}, timeout=60, trust_env=False)
        assert refused.status_code == (400 if is_allowed else 403)
        assert refused.headers.get("Access-Control-Allow-Origin") == (origin if is_allowed else None)


def test_the_pages_need_no_internet(thinking_stage: tuple[Deployment, Backstage]) -> None:
    deployment, _ = thinking_stage
    page = deployment.get("/")
    assert page.status_code == 200 and page.headers["Content-Type"].startswith("text/html") and "/docs" in page.text
    docs = deployment.get("/docs").text
    assert "https://" not in docs.replace('"https://fastapi.tiangolo.com', "") and "cdn" not in docs
    for address in [part.split('"')[0] for part in docs.split('src="')[1:]] + [
        part.split('"')[0] for part in docs.split('href="')[1:]
    ]:
        assert deployment.get(address).status_code == 200, address
    assert deployment.get("/openapi.json").json()["components"]["schemas"]["ChatCompletionBody"]["properties"]["tools"]


def test_a_body_without_a_content_type_is_read(thinking_stage: tuple[Deployment, Backstage]) -> None:
    deployment, backstage = thinking_stage
    thread, _ = answering(backstage, ["ok"])
    headers = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl -d sends
    reply = httpx.post(
        deployment.url() + "/v1/chat/completions",
        content=json.dumps(BODY).encode(),
        headers=headers,
        timeout=60,
        trust_env=False,
    )
    thread.join()
    assert reply.json()["choices"][0]["message"]["content"] == "ok"
    with pytest.raises(openai.BadRequestError, match="images can't be understood"):
        image: Any = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        deployment.client().chat.completions.create(model=NAME, messages=[{"role": "user", "content": [image]}])


@pytest.mark.parametrize("has_positions", [False, True])
def test_a_stream_that_waits_is_kept_open_by_what_no_client_takes_for_an_event(
    thinking_stage: tuple[Deployment, Backstage], has_positions: bool
) -> None:
    deployment, backstage = thinking_stage
    url, ping = deployment.url() + "/v1/chat/completions", b": waiting\n" if has_positions else b"\n\n"
    body = BODY | {"stream": True, "stream_options": {"include_position": has_positions, "include_usage": True}}
    with httpx.stream("POST", url, json=body, timeout=60, trust_env=False) as response:
        [request] = backstage.take()
        received, waiting = response.iter_bytes(), b""
        while waiting.count(ping) < 2:
            waiting += next(received)
        backstage.write(request, 1, 2, finish=2)
        events = b"".join(received).replace(b": waiting\n", b"" if has_positions else b"?").decode()
    assert not waiting.replace(ping, b"")  # not even the opening comes before the first tokens
    blocks = [block for block in events.split("\n\n") if block]
    assert [block.startswith("id: ") for block in blocks] == [has_positions and 0 < number < 5 for number in range(6)]
    assert all("data: " in block if has_positions else block.startswith("data: ") for block in blocks)
    assert '"role":"assistant"' in blocks[0] and blocks[-1] == "data: [DONE]"
