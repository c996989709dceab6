"""Small things on which real clients insist."""

import gzip
import json
import socket
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from services.requests.bodies.ignored import HEADER
from shared.model.context_length import context_exceeded, context_far_exceeded, sizes_of
from shared.wire.load import Load
from shared.wire.messages import RequestError
from tests.deployment import Deployment
from tests.gateway.backstage import NAME, Backstage
from tests.gateway.conftest import start_gateways
from tests.gateway.test_answers import LOOK, answering
from tests.gateway.test_ignored import ASKED, answered
from tests.waiting import wait_until

CHAT = ASKED["/v1/chat/completions"]


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


def post(gateways: Deployment, content: bytes, **headers: str) -> httpx.Response:
    return httpx.post(
        f"{gateways.url()}/v1/chat/completions",
        content=content,
        headers={"Content-Type": "application/json", **headers},
        timeout=60,
    )


@pytest.mark.parametrize("path", ASKED)
def test_a_model_that_is_left_out_is_the_one_that_is_served(
    gateways: Deployment, backstage: Backstage, path: str
) -> None:
    body = {key: value for key, value in ASKED[path].items() if key != "model"} | {"stream": False}
    answer = answered(gateways, backstage, path, body)
    assert answer.json()["model"] == NAME and HEADER not in answer.headers


def test_of_several_models_one_must_be_named(deployment: Deployment, own: Backstage) -> None:
    other = Backstage(deployment.redis_url, model="rock", aliases=())
    try:
        start_gateways(deployment)
        refused = deployment.post("/v1/chat/completions", {"messages": CHAT["messages"]})
        assert (refused.status_code, refused.json()["error"]["param"]) == (
            400,
            "model",
        ) and f"{NAME}, rock" in refused.json()["error"]["message"]
    finally:
        other.close()


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("gzip", gzip.compress),
        ("deflate", zlib.compress),
        ("deflate", raw_deflate),
        ("x-gzip", gzip.compress),
        ("identity", bytes),
    ],
)
def test_a_compressed_body_is_read(gateways: Deployment, name: str, pack: Any) -> None:
    body = json.dumps({**CHAT, "n": 0}).encode()  # which is refused by name: so it was read
    refused = post(gateways, pack(body), **{"Content-Encoding": name})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")


def test_a_body_that_grows_beyond_the_bound_is_refused_before_it_is_in_memory(gateways: Deployment) -> None:
    bomb = gzip.compress(b" " * (64 << 20))
    refused = post(gateways, bomb, **{"Content-Encoding": "gzip"})
    assert refused.status_code == 413 and "decoded, is longer than 33554432 bytes" in refused.json()["error"]["message"]


def test_a_broken_encoding_is_400_and_one_that_nobody_takes_is_415(gateways: Deployment) -> None:
    body = json.dumps(CHAT).encode()
    for content in (body, gzip.compress(body)[:-9], gzip.compress(body) + b"more"):
        refused = post(gateways, content, **{"Content-Encoding": "gzip"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_content_encoding")
    for name in ("zstd", "br", "gzip, gzip"):
        unknown = post(gateways, body, **{"Content-Encoding": name})
        assert (unknown.status_code, unknown.headers["Accept-Encoding"]) == (415, "gzip, deflate, identity")
        assert (
            unknown.json()["error"]["type"] == "invalid_request_error"
            and "only gzip, deflate, identity" in unknown.json()["error"]["message"]
        )


def test_a_byte_order_mark_is_no_part_of_the_body(gateways: Deployment) -> None:
    refused = post(gateways, b"\xef\xbb\xbf" + json.dumps({**CHAT, "n": 0}).encode())
    assert refused.json()["error"]["param"] == "n"


def test_a_prompt_that_is_too_long_has_its_sizes_where_llama_cpp_s_clients_look(
    gateways: Deployment, backstage: Backstage
) -> None:
    error = context_exceeded("prompt", 8192, 9000, 1)
    for path, kind in (("/v1/completions", "invalid_request_error"), ("/completion", "exceed_context_size_error")):
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(gateways.post, path, {"model": NAME, "prompt": "Hi"})
            [request] = backstage.take()
            backstage.end(request, error=RequestError(str(error), 400, error.param, error.code))
            refused = asked.result()
        told = refused.json()["error"]
        assert (refused.status_code, told["type"], told["n_prompt_tokens"], told["n_ctx"]) == (400, kind, 9000, 8192)
        assert told["code"] == (400 if path == "/completion" else "context_length_exceeded")
    far = context_far_exceeded("input", 8192, 10_000)
    assert sizes_of(str(far)) == (10_000, 8192) and sizes_of("something else") is None


def test_slots_are_the_places_in_the_replicas_steps(deployment: Deployment) -> None:
    own = Backstage(deployment.redis_url, load=Load(max_num_seqs=3, running=2))
    try:
        start_gateways(deployment)
        slots = deployment.get("/slots").json()
        assert [(slot["id"], slot["is_processing"], slot["n_ctx"]) for slot in slots] == [
            (0, True, 100_000),
            (1, True, 100_000),
            (2, False, 100_000),
        ]
        assert deployment.get("/slots?fail_on_no_slot=1").status_code == 200
    finally:
        own.close()
    full = Backstage(deployment.redis_url, load=Load(max_num_seqs=1, running=1))
    try:
        wait_until(
            lambda: deployment.get("/slots?fail_on_no_slot=1").status_code == 503, description="no place is free"
        )
    finally:
        full.close()


def test_logprobs_of_the_whole_vocabulary_are_refused_by_name(gateways: Deployment) -> None:
    for field in ({"prompt_logprobs": -1}, {"logprobs": -1}):
        [name] = field
        refused = gateways.post("/v1/completions", {"model": NAME, "prompt": "x"} | field)
        told = refused.json()["error"]
        assert (refused.status_code, told["param"]) == (400, name) and "whole vocabulary" in told["message"]


def test_what_is_used_where_the_request_is_silent_is_said(deployment: Deployment) -> None:
    """A model's card, for pages that show it, and a response's object say it."""
    own = Backstage(deployment.redis_url, sampling={"temperature": 0.2, "top_p": 0.9})
    try:
        start_gateways(deployment)
        [card] = [each for each in deployment.get("/v1/models").json()["data"] if each["id"] == NAME]
        assert card["sampling"] == {
            "temperature": 0.2,
            "top_p": 0.9,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        }
        for asked, told in (({}, (0.2, 0.9)), ({"temperature": 1}, (1.0, 0.9))):
            response = answered(deployment, own, "/v1/responses", ASKED["/v1/responses"] | asked).json()
            assert (response["temperature"], response["top_p"]) == told
            again = deployment.get(f"/v1/responses/{response['id']}").json()
            assert (again["temperature"], again["top_p"]) == told, "stored with it"
    finally:
        own.close()


def test_a_model_s_card_has_what_openrouter_s_clients_require(deployment: Deployment) -> None:
    own = Backstage(deployment.redis_url, parsers={"tool_calls": "hermes"})
    try:
        start_gateways(deployment)
        found = deployment.get("/v1/models").json()
        assert found["links"] == {"next": None} and found["total_count"] == len(found["data"])
        card = next(each for each in found["data"] if each["id"] == NAME)
        assert (card["name"], card["canonical_slug"], card["context_length"]) == (NAME, NAME, 100_000)
        assert card["architecture"] == {
            "modality": "text->text",
            "input_modalities": ["text"],
            "output_modalities": ["text"],
        }
        assert (card["pricing"], card["per_request_limits"]) == ({"prompt": "0", "completion": "0"}, None)
        assert card["top_provider"] == {
            "is_moderated": False,
            "context_length": 100_000,
            "max_completion_tokens": 100_000,
        }
        assert {"temperature", "tools", "response_format"} <= set(
            card["supported_parameters"]
        ) and "reasoning_effort" not in card["supported_parameters"]
        assert (
            deployment.get(card["links"]["details"]).json() == card and card["default_parameters"] == card["sampling"]
        )
    finally:
        own.close()


def test_a_batch_names_its_model_before_the_worker_has_read_its_file(gateways: Deployment) -> None:
    line = json.dumps(
        {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": NAME, "prompt": "x"}}
    ).encode()
    for content, model in (
        (b"\xef\xbb\xbf\n" + line + b"\n" + line, NAME),
        (b"no JSON", None),
        (b'{"body": {"model": 7}}', None),
    ):
        upload = httpx.post(
            f"{gateways.url()}/v1/files", files={"file": ("x.jsonl", content)}, data={"purpose": "batch"}
        )
        body = {"input_file_id": upload.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        made = gateways.post("/v1/batches", body).json()
        assert made["model"] == model == gateways.get(f"/v1/batches/{made['id']}").json()["model"]


def test_ollama_s_clients_find_a_level_that_they_know_and_what_they_read_of_a_model(gateways: Deployment) -> None:
    told = gateways.get("/api/version").json()
    assert tuple(map(int, told["version"].split("."))) >= (0, 14, 0) and told["penstock"]
    shown = gateways.post("/api/show", {"model": NAME}).json()["model_info"]
    assert shown["general.basename"] == NAME and shown[f"{shown['general.architecture']}.context_length"] == 100_000


def test_ollama_s_pull_of_a_served_model_succeeds(gateways: Deployment) -> None:
    lines = [json.loads(line) for line in gateways.post("/api/pull", {"model": f"{NAME}:latest"}).text.splitlines()]
    assert lines[-1] == {"status": "success"} and len(lines) > 1
    assert gateways.post("/api/pull", {"name": NAME, "stream": False}).json() == {"status": "success"}
    absent = gateways.post("/api/pull", {"model": "llama3"})
    assert absent.status_code == 404 and "llama3" in absent.json()["error"]


def test_ollama_s_fields_are_answered_as_its_clients_expect(gateways: Deployment, backstage: Backstage) -> None:
    for keep_alive, reason in ((0, "unload"), ("0s", "unload"), ("5m", "load"), (None, "load")):
        assert gateways.post("/api/generate", {"model": NAME, "keep_alive": keep_alive}).json()["done_reason"] == reason
    told = answered(
        gateways,
        backstage,
        "/api/generate",
        {"model": NAME, "prompt": "Hi", "context": [1, 2], "options": {"num_ctx": 4096, "top_k": 3}},
    )
    assert told.headers[HEADER] == "context, options.num_ctx"
    for field, word in (
        ({"suffix": "end"}, "suffix: this endpoint does not fill in"),
        ({"images": ["aGk="]}, "reads text only: images can't be understood"),
    ):
        refused = gateways.post("/api/generate", {"model": NAME, "prompt": "Hi"} | field)
        assert refused.status_code == 400 and word in refused.json()["error"]


@pytest.mark.parametrize(
    "path", ["/v1/models", "/v1/batches", "/v1/files", "/api/tags", "/api/version", "/health", f"/v1/models/{NAME}"]
)
def test_a_slash_at_the_end_of_a_path_says_nothing(gateways: Deployment, path: str) -> None:
    plain, slash = gateways.get(path), gateways.get(f"{path}/")
    assert (slash.status_code, slash.json().keys()) == (
        plain.status_code,
        plain.json().keys(),
    ) and plain.status_code == 200
    refused = gateways.post("/v1/chat/completions/", CHAT | {"n": 0})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")


def over_http_1_0(gateways: Deployment, body: dict[str, Any]) -> bytes:
    url = httpx.URL(gateways.url())
    content = json.dumps(body).encode()
    with socket.create_connection((url.host, url.port or 80), timeout=60) as connection:
        head = (
            "POST /v1/chat/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: "
            f"{len(content)}\r\n\r\n"
        )
        connection.sendall(head.encode() + content)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_an_answer_over_http_1_0_has_no_chunks_and_ends_with_the_connection(
    gateways: Deployment, backstage: Backstage
) -> None:
    thread, _ = answering(backstage, ["one", " two"])
    head, _, body = over_http_1_0(gateways, CHAT | {"stream": True}).partition(b"\r\n\r\n")
    thread.join()
    assert b"transfer-encoding" not in head.lower() and b"connection: close" in head.lower()
    assert body.startswith(b"data: {") and body.endswith(b"data: [DONE]\n\n") and b" two" in body
    thread, _ = answering(backstage, ["one"])
    head, _, body = over_http_1_0(gateways, CHAT).partition(b"\r\n\r\n")
    thread.join()
    assert (
        f"content-length: {len(body)}".encode() in head.lower()
        and json.loads(body)["choices"][0]["message"]["content"] == "one"
    )


def test_the_first_delta_of_a_forced_call_has_no_content(gateways: Deployment, backstage: Backstage) -> None:
    for choice, first in (("required", None), ("auto", "")):
        thread, _ = answering(backstage, ['[{"name": "look", "parameters": {}}]'])
        answer = gateways.post("/v1/chat/completions", CHAT | {"stream": True, "tools": [LOOK], "tool_choice": choice})
        thread.join()
        assert json.loads(answer.text.partition("data: ")[2].partition("\n")[0])["choices"][0]["delta"] == {
            "role": "assistant",
            "content": first,
        }
