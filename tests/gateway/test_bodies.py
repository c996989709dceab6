"""Bodies: what is wrong is named, and no body of any shape keeps the others waiting."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import psutil
import pytest

from bench.bodies import measure, shapes
from services.gateway import bodies
from services.gateway.http.bodies import names_of
from services.requests.dialects.openai.schemas import ChatCompletionBody
from shared.process.errors import Invalid
from tests.deployment import Deployment
from tests.gateway.backstage import NAME, Backstage
from tests.gateway.streams import BODY
from tests.hostile.depths import HERE, content_of
from tests.waiting import wait_until

CHAT = {"model": NAME, "messages": [{"role": "user", "content": "x"}]}
LONG = "x" * 100_000  # parsed by the helper
MIB = 1 << 20


def post(gateways: Deployment, content: bytes, path: str = "/v1/completions") -> httpx.Response:
    return httpx.post(gateways.url() + path, content=content, timeout=60, trust_env=False)


def refused(reply: httpx.Response) -> tuple[str | None, str]:
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    return error["param"], error["message"]


def test_who_sends_too_much_is_told_so_and_not_cut_off(gateways: Deployment) -> None:
    async def send() -> list[httpx.Response]:
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:  # which sends all before it reads
            return [
                await client.post(gateways.url() + "/v1/completions", content=b"x" * (num_mib * MIB))
                for num_mib in (33, 50)
            ]

    for reply in asyncio.run(send()):
        assert reply.status_code == 413 and "longer than" in reply.json()["error"]["message"]
        assert reply.json()["error"]["code"] == "body_too_large"


@pytest.mark.parametrize("padding", ["", LONG])
def test_the_first_wrong_item_is_named_in_short_bodies_and_in_long_ones(gateways: Deployment, padding: str) -> None:
    cases: list[tuple[str, Any, str]] = [
        ("prompt", [1, "x", 1.5], "prompt[1]"),
        ("prompt", ["x", 1], "prompt[1]"),
        ("prompt", [[1], [2, None]], "prompt[1][1]"),
        ("prompt", [[1], []], "prompt[1]"),
        ("prompt", [1, -1], "prompt[1]"),
        ("prompt", [1, 1 << 31], "prompt[1]"),
        ("prompt", [1 << 63], "prompt[0]"),
        ("prompt", [True], "prompt[0]"),
        ("prompt", {"text": "x"}, "prompt"),
        ("prompt", [], "prompt"),
        ("prompt", ["x"] * 129, "prompt"),
        ("stop", ["x"] * 17, "stop"),
        ("logit_bias", {str(token): 1 for token in range(1025)}, "logit_bias"),
        ("logit_bias", {"10": 1, "1_0": 2}, "logit_bias"),
        ("logit_bias", {"": 1}, "logit_bias"),
        ("n", "many", "n"),
        ("lora", "x", "lora"),
        ("stream_options", {"include_usage": 1}, "stream_options.include_usage"),
    ]
    for field, value, param in cases:
        body = {"model": NAME, "prompt": "x", "user": "x", field: value, "cache_salt": padding[:256] or "x"}
        content = httpx.Request("POST", "http://x", json=body).content + b" " * len(padding)
        assert refused(post(gateways, content))[0] == param, value
    huge = b'{"model": "m", "prompt": [1, 1%s]%s}' % (
        b"0" * 30,
        b" " * len(padding),
    )  # an integer, though no float of 64 bits would know
    assert refused(post(gateways, huge)) == (
        "prompt[1]",
        "prompt[1]: expected a token id like those before it, got a number beyond 64 bits",
    )
    for parts, param in (
        ([{"type": "text", "text": "x"}, {"type": "image_url"}], "messages[0].content[1]"),
        ([{"type": "text", "text": 1}], "messages[0].content[0].text"),
        (["x"], "messages[0].content[0]"),
        (None, "messages[0].content"),
    ):
        reply = gateways.post(
            "/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": parts}], "user": padding[:4096]}
        )
        assert refused(reply)[0] == param


def test_lone_surrogates_and_other_broken_json_are_400(gateways: Deployment) -> None:
    for content in (rb'"\ud83d"', b'"\xff"', b"NaN", b'{"a":1,}', b""):
        param, message = refused(post(gateways, b'{"model":"m","prompt":' + content + b"}"))
        assert param is None and "not JSON" in message
    for field in ("stop", "user"):
        assert "surrogate" in refused(post(gateways, b'{"model":"m","prompt":"x","%b":"\\udc00"}' % field.encode()))[1]
    assert refused(post(gateways, b"[1]"))[1] == "the body must be a JSON object, got a list"


@pytest.mark.parametrize("padding", ["", LONG])
def test_what_is_nested_too_deep_is_refused_in_each_api_s_shape(gateways: Deployment, padding: str) -> None:
    """A helper parses long bodies, and goes on."""
    before = {each.pid for each in helper(gateways)}
    call = {"function": {"name": "f", "arguments": HERE}}
    block = {"type": "tool_use", "id": "c", "name": "f", "input": HERE}
    bodies: dict[str, Any] = {
        "/v1/chat/completions": {
            "messages": [
                CHAT["messages"][0],
                {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", **call}]},
            ]
        },
        "/v1/messages": {"max_tokens": 1, "messages": [CHAT["messages"][0], {"role": "assistant", "content": [block]}]},
        "/api/chat": {"messages": [CHAT["messages"][0], {"role": "assistant", "content": "", "tool_calls": [call]}]},
        "/v1/responses": {"input": [{"type": "local_shell_call", "call_id": "c", "action": HERE}]},
    }
    for path, body in bodies.items():
        for depth in (200, 255, 987, 5000):
            reply = post(
                gateways, content_of({"model": NAME, "user": padding} | body, '{"a":' * depth + "1" + "}" * depth), path
            )
            said = reply.json()["error"]
            message = said if isinstance(said, str) else said["message"]
            assert reply.status_code == 400 and message.endswith("the body is nested deeper than 144 levels"), (
                path,
                depth,
                reply.text,
            )
            assert "Retry-After" not in reply.headers and isinstance(said, str) == path.startswith("/api")
            assert (reply.json().get("type") == "error") == (path == "/v1/messages")
    assert not before or {each.pid for each in helper(gateways)} == before


def test_parts_are_joined_and_long_prompts_arrive_whole(gateways: Deployment, backstage: Backstage) -> None:
    parts = [{"type": "text", "text": "é" * 50_000}, {"type": "text", "text": "b"}]
    ids = list(range(50_000))
    with ThreadPoolExecutor(2) as pool:
        pool.submit(
            gateways.post,
            "/v1/chat/completions",
            CHAT | {"messages": [{"role": "user", "content": parts, "name": "Ann"}]},
        )
        [chat] = backstage.take()
        pool.submit(
            gateways.post, "/v1/completions", BODY | {"stream": False, "stream_options": None, "prompt": [ids, [7]]}
        )
        first, second = backstage.take(2)
        for request in (chat, first, second):
            backstage.end(request)
    assert chat.messages is not None and (chat.messages[0].content, chat.messages[0].name) == (
        "é" * 50_000 + "b",
        "Ann",
    )
    assert first.prompt_token_ids is not None and first.prompt_token_ids.tolist() == ids
    assert second.prompt_token_ids is not None and second.prompt_token_ids.tolist() == [7]


def helper(gateways: Deployment) -> list[psutil.Process]:
    gateway = psutil.Process(gateways.processes["gateway-1"].pid)
    found = []
    for child in gateway.children():
        with suppress(psutil.NoSuchProcess):  # killed, and the gateway has not heard of it yet
            found += [child] if "services.gateway.bodies" in child.cmdline() else []
    return found


def test_a_helper_that_dies_costs_nobody_a_request_and_it_dies_with_its_gateway(gateways: Deployment) -> None:
    content = b'{"model":"m","prompt":[1,"x"],"user":"' + LONG[:4000].encode() + b'"' + b" " * MIB + b"}"
    assert refused(post(gateways, content))[0] == "prompt[1]"
    [before] = helper(gateways)
    before.kill()
    assert refused(post(gateways, content))[0] == "prompt[1]"
    wait_until(lambda: [each for each in helper(gateways) if each.pid != before.pid], description="there is another")
    assert refused(post(gateways, content))[0] == "prompt[1]"


def test_no_shape_of_8_mib_keeps_others_waiting(gateways: Deployment) -> None:
    """bench/bodies.py measures it; here, with room for a busy machine: the worst once took minutes."""
    for name, path, body in shapes(8 * MIB):
        if name in ("token ids, all wrong", "a million lists", "unknown fields"):
            waited, _, took = asyncio.run(measure(gateways.url(), path, body, repeats=1))
            assert waited < 10_000 and took < 40_000, (name, waited, took)


def test_what_is_not_here_is_said_in_each_api_s_shape(gateways: Deployment) -> None:
    absent = gateways.get("/v1/assistants")
    assert (absent.status_code, absent.json()["error"]["code"]) == (
        404,
        "unknown_url",
    ) and "no GET /v1/assistants" in absent.json()["error"]["message"]
    other = gateways.post("/v1/responses/compact", {})
    assert (other.status_code, other.json()["error"]["code"]) == (405, "method_not_supported") and other.headers[
        "Allow"
    ]
    assert "no POST /api/push" in gateways.post("/api/push", {"model": "x"}).json()["error"]
    assert gateways.get("/v1/messages/absent").json()["error"]["type"] == "not_found_error"


def test_the_docs_list_the_bodies_fields(gateways: Deployment) -> None:
    described = gateways.get("/openapi.json").json()
    for path, name, field in (
        ("/v1/completions", "CompletionBody", "prompt"),
        ("/v1/chat/completions", "ChatCompletionBody", "messages"),
    ):
        schema = described["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": f"#/components/schemas/{name}"}
        properties = described["components"]["schemas"][name]["properties"]
        assert (
            field in properties
            and "temperature" in properties
            and "smaller is sooner" in properties["priority"]["description"]
        )


@pytest.mark.parametrize("field", ["response_format", "tools"])
def test_a_schema_of_megabytes_is_refused_in_the_helper(field: str) -> None:
    """So that the gateway's loop never has it."""
    schema = {"type": "object", "properties": {f"property {number}": {"type": "string"} for number in range(120_000)}}
    value: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    if field == "tools":
        value = [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]
    content = json.dumps(
        CHAT | {field: value, "tool_choice": "required"} if field == "tools" else CHAT | {field: value}
    ).encode()
    assert len(content) > 4 * MIB
    with pytest.raises(Invalid):
        bodies.answer(names_of(ChatCompletionBody) + content)


@pytest.mark.parametrize(
    "path", ["/v1/responses/", "/v1/streams/", "/v1/files/", "/v1/batches/", "/v1/messages/batches/"]
)
def test_a_long_id_is_not_echoed_whole(gateways: Deployment, path: str) -> None:
    refused = gateways.get(path + "a" * 5000)
    assert refused.status_code == 404 and len(refused.json()["error"]["message"]) < 200
