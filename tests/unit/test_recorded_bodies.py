"""Bodies as real clients send them, without their content: each field is understood, or passed over by name."""

from pathlib import Path
from typing import Any

import orjson
import pytest

from services.requests.bodies.body import Body
from services.requests.bodies.ignored import collecting, pass_over
from services.requests.bodies.parse import check, parse
from services.requests.dialects.anthropic.chat import chat_of as message_chat
from services.requests.dialects.anthropic.schemas import MessagesBody
from services.requests.dialects.llamacpp.schemas import InfillBody
from services.requests.dialects.openai.schemas import ChatCompletionBody, CompletionBody
from services.requests.dialects.responses.chat import chat_of as response_chat
from services.requests.dialects.responses.events import ResponseEvents
from services.requests.dialects.responses.schemas import ResponseBody
from services.requests.dialects.responses.tools import chat_name
from services.requests.store.record import make_record
from services.requests.text.answers.answer import Answer
from services.requests.text.answers.formats import delta_fields, message_fields
from shared.model.sampling_params import SamplingParams
from shared.process.errors import Invalid
from tests.unit.deltas import USAGE

RECORDED = sorted(Path("tests/recorded").glob("*.json"))


BODIES: dict[str, type[Body]] = {
    "chat": ChatCompletionBody,
    "message": MessagesBody,
    "response": ResponseBody,
    "infill": InfillBody,
}


def params_of(kind: str, body: dict[str, Any]) -> SamplingParams:
    """As the route reads it: everything in it is looked at."""
    if kind != "infill":
        chat = chat_of(kind, body)
        chat.calling()
        return chat.params()
    parsed = parse(InfillBody, orjson.dumps(body))
    pass_over(*parsed.passed_over)
    return check(CompletionBody, parsed.as_completion("m", ["x"], {})).params()


def chat_of(kind: str, body: dict[str, Any]) -> ChatCompletionBody:
    parsed = parse(BODIES[kind], orjson.dumps(body))
    pass_over(*parsed.passed_over)
    if isinstance(parsed, MessagesBody):
        return message_chat(parsed)
    if isinstance(parsed, ResponseBody):
        return response_chat(parsed, [])
    assert isinstance(parsed, ChatCompletionBody)
    return parsed


def read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(path.read_bytes())
    return found


@pytest.mark.parametrize("path", RECORDED, ids=[path.stem for path in RECORDED])
def test_a_real_client_s_body_is_taken_and_what_is_passed_over_is_named(path: Path) -> None:
    recorded = read(path)
    with collecting() as names:
        params_of(recorded["kind"], recorded["body"])
    assert set(names) == set(recorded["ignored"])
    with collecting(is_strict=True), pytest.raises(Invalid, match="unknown or unsupported field") as refused:
        params_of(recorded["kind"], recorded["body"])
    assert refused.value.code == "unknown_parameter"


def codex(**more: Any) -> ResponseBody:
    return parse(ResponseBody, orjson.dumps(read(Path("tests/recorded/codex.json"))["body"] | more))


def test_codex_s_tools_are_functions_of_the_chat_and_its_items_are_messages() -> None:
    chat = response_chat(codex(), [])
    names = [tool.function.name for tool in chat.calling().tools]
    assert names == ["shell", "apply_patch", "mcp__calendar__lookup", "mcp__calendar__note"]
    patch = chat.calling().tools[1].function
    assert patch.parameters == {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
    assert 'start: "x"' in (patch.description or "")
    wire = [message.to_wire() for message in chat.messages]
    assert [message.role for message in wire] == ["system", "developer", "user", *["assistant", "tool"] * 4]
    assert [(call.name, call.arguments) for message in wire for call in message.tool_calls] == [
        ("shell", "{}"),
        ("apply_patch", '{"input": "*** Begin Patch"}'),
        ("local_shell", '{"type":"exec","command":["ls"]}'),
        ("mcp__calendar__lookup", "{}"),
    ]
    assert [message.tool_call_id for message in wire if message.role == "tool"] == ["c1", "c2", "c3", "c4"]


def test_calls_of_custom_tools_and_namespaces_come_back_by_their_own_names() -> None:
    body = codex(parallel_tool_calls=True)
    calling = response_chat(body, []).calling()
    answer = Answer(calling.parsing("hermes", ""), "resp_1.0", has_reasoning=True)
    made = ResponseEvents(make_record("response", "m", "m"), body.asked(SamplingParams()))
    events = made.opening(None)
    calls = (
        '{"name": "apply_patch", "arguments": {"input": "a \\"b\\"\\n"}}',
        '{"name": "mcp__calendar__lookup", "arguments": {"day": 1}}',
    )
    texts = [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    pieces = [text[at : at + 5] for text in texts for at in range(0, len(text), 5)]
    for number, piece in enumerate(pieces):
        events += made.add(answer.add(piece, is_end=number == len(pieces) - 1))
    made.closing(USAGE, {})
    patch, lookup = made.whole()["output"]
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "apply_patch", 'a "b"\n')
    assert (lookup["type"], lookup["name"], lookup["namespace"]) == ("function_call", "lookup", "mcp__calendar__")
    assert orjson.loads(lookup["arguments"]) == {"day": 1}
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == 'a "b"\n'
    whole = message_fields(answer)["tool_calls"]
    assert whole[0] == {"id": patch["call_id"], "type": "custom", "custom": {"name": "apply_patch", "input": 'a "b"\n'}}


def test_two_namespaces_may_have_a_tool_of_one_name_and_long_names_stay_apart() -> None:
    assert chat_name("find", "crm") == "crm__find" and chat_name("find", "mcp__x__") == "mcp__x__find"
    first, second = chat_name("a" * 60 + "1", "crm"), chat_name("a" * 60 + "2", "crm")
    assert len(first) == len(second) == 64 and first != second


@pytest.mark.parametrize(
    "choice", [{"type": "web_search"}, {"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]}]
)
def test_a_forced_tool_that_nobody_here_runs_is_refused(choice: dict[str, Any]) -> None:
    with pytest.raises(Invalid) as refused:
        response_chat(codex(tool_choice=choice), []).calling()
    assert refused.value.param == "tool_choice"


def test_required_where_only_a_server_s_tools_are_left_is_refused_in_each_api() -> None:
    asked = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    with pytest.raises(Invalid) as chat:
        chat_of("chat", asked | {"tools": [{"type": "web_search"}], "tool_choice": "required"}).calling()
    assert chat.value.param == "tool_choice"
    search = {"type": "web_search_20250305", "name": "web_search"}
    for choice in ({"type": "any"}, {"type": "tool", "name": "web_search"}):
        with pytest.raises(Invalid, match="tool_choice"):
            chat_of("message", asked | {"max_tokens": 9, "tools": [search], "tool_choice": choice}).calling()
    left_out = chat_of("message", asked | {"max_tokens": 9, "tools": [search], "tool_choice": {"type": "auto"}})
    assert left_out.calling().tools == ()


@pytest.mark.parametrize(
    ("kind", "more", "param", "named"),
    [
        ("chat", {"tools": [{"type": "mcp", "server_label": "x", "server_url": "https://x/mcp"}]}, "tools[0]", "mcp"),
        ("message", {"mcp_servers": [{"type": "url", "url": "https://x/mcp", "name": "x"}]}, "mcp_servers", "mcp"),
        (
            "message",
            {"tools": [{"name": "f", "input_schema": {}}, {"type": "mcp_toolset", "mcp_server_name": "x"}]},
            "tools[1]",
            "mcp_toolset",
        ),
    ],
)
def test_a_tool_of_the_client_s_own_that_a_server_would_run_is_refused(
    kind: str, more: dict[str, Any], param: str, named: str
) -> None:
    with pytest.raises(Invalid, match=rf"runs no tools of the type {named}:") as refused:
        chat_of(kind, {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]} | more).calling()
    assert refused.value.param == param


@pytest.mark.parametrize(
    "tool", [{"type": "mcp", "server_label": "x"}, {"type": "file_search", "vector_store_ids": ["vs_1"]}]
)
def test_so_it_is_in_a_response_and_in_a_namespace(tool: dict[str, Any]) -> None:
    for tools, param in (
        ([tool], "tools[0]"),
        ([{"type": "namespace", "name": "n", "tools": [tool]}], "tools[0].tools[0]"),
    ):
        with pytest.raises(Invalid, match=f"type {tool['type']}") as refused:
            response_chat(codex(tools=tools), [])
        assert refused.value.param == param


def test_a_wrong_tool_is_named_by_its_place_in_the_request() -> None:
    wrong = [
        {"type": "web_search"},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f", "parameters": 3}]},
    ]
    with pytest.raises(Invalid) as response:
        response_chat(codex(tools=wrong), [])
    assert response.value.param == "tools[1].tools[0].parameters"
    body = {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "bash_1", "name": "bash"}, {"name": "no space"}],
    }
    with pytest.raises(Invalid) as message:
        chat_of("message", body)
    assert message.value.param == "tools[1].name"


def test_functions_are_tools_by_their_older_name() -> None:
    add = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}},
        {"role": "function", "name": "add", "content": "2"},
    ]
    chat = chat_of("chat", {"model": "m", "messages": messages, "functions": [add], "function_call": "auto"})
    said, told = [message.to_wire() for message in chat.messages][1:]
    assert (said.tool_calls[0].name, told.role) == ("add", "tool") and told.tool_call_id == said.tool_calls[0].call_id
    answer = Answer(chat.calling().parsing("hermes", ""), "c.0", has_reasoning=True)
    delta = answer.add('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', is_end=True)
    assert message_fields(answer) == {"content": None, "function_call": {"name": "add", "arguments": '{"a": 1}'}}
    assert delta_fields(delta, is_legacy=True) == {"function_call": {"name": "add", "arguments": '{"a": 1}'}}
    for wrong, param in (
        ({"functions": [add], "tools": [{"type": "function", "function": add}]}, "functions"),
        ({"function_call": {"name": "f"}}, "function_call"),
    ):
        with pytest.raises(Invalid) as refused:
            chat_of("chat", {"model": "m", "messages": messages} | wrong).calling()
        assert refused.value.param == param
