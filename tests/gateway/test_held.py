"""Redis' contents are bounded: nothing stays of what was refused, a tenant holds so much and no
more, and near the memory limit new requests wait.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from services.operator.redis_server import default_memory, socket_path, start_server
from services.requests.store.tenants.api_keys import add_key
from shared.process.host_memory import total_host_memory
from shared.wire.messages import RequestError
from shared.wire.redis_memory import memory_of
from shared.wire.streams import (
    LOG_TTL_S,
    RUNNING_LOG_TTL_S,
    held_bytes_key,
    held_key,
    log_key,
    open_key,
    reader_key,
    response_key,
    stored_key,
)
from tests.conftest import answers
from tests.deployment import Deployment
from tests.gateway.backstage import NAME, Backstage
from tests.gateway.conftest import start_gateways
from tests.gateway.streams import BODY, begun, streaming
from tests.gateway.test_access import bearer
from tests.waiting import wait_until

TOO_LONG = RequestError("the prompt is too long", 400, "input", "context_length_exceeded")
LIMIT = 1 << 20
WHOLE = BODY | {"stream": False, "stream_options": None}


def ask(deployment: Deployment, text: str, key: str = "", **fields: Any) -> httpx.Response:
    return httpx.post(
        deployment.url() + "/v1/responses",
        json={"model": NAME, "input": text} | fields,
        headers=bearer(key),
        timeout=120,
        trust_env=False,
    )


def bytes_of(client: "redis.Redis", tenant_id: str = "") -> int:
    return int(client.get(held_bytes_key(held_key(tenant_id))) or 0)


def test_what_was_refused_leaves_nothing_in_redis(deployment: Deployment, own: Backstage) -> None:
    start_gateways(deployment)
    count, text = 2, "x" * 7_800_000  # as many tokens as may be in flight
    with ThreadPoolExecutor(count) as threads:
        asked = [threads.submit(ask, deployment, text) for _ in range(count)]
        for request in own.take(count):
            assert own.client.exists(stored_key(request.request_id.removesuffix(".0"))) and bytes_of(own.client) >= len(
                text
            )
            own.end(request, error=TOO_LONG)
            own.client.xtrim(f"requests:{NAME}", maxlen=0)  # as the tokenizer does
        assert [each.result().status_code for each in asked] == [400] * count
    assert own.client.keys("stored:*") == own.client.keys("open:*") == [] and bytes_of(own.client) == 0
    assert sum(own.client.memory_usage(key) or 0 for key in own.client.keys("*")) < 1 << 20


def test_who_asks_for_a_refused_background_response_is_told_why(gateways: Deployment, backstage: Backstage) -> None:
    made = ask(gateways, "hello", background=True).json()
    backstage.end(backstage.take()[0], error=TOO_LONG)
    found = gateways.get(f"/v1/responses/{made['id']}").json()
    assert found["status"] == "failed" and found["error"]["message"] == TOO_LONG.message


def test_all_that_is_kept_of_a_response_lives_as_long_as_its_log(gateways: Deployment, backstage: Backstage) -> None:
    client = backstage.client
    with streaming(gateways, n=2) as stream:
        first, second = backstage.take(2)
        response_id = first.request_id.rpartition(".")[0]
        backstage.write(first, 1, 2, finish=2)
        assert client.ttl(response_key(response_id)) > LOG_TTL_S, "one of its sequences runs"
        backstage.write(second, 1, finish=1)
        stream.wait_end()
    assert not client.exists(open_key(response_id))
    assert gateways.get(f"/v1/streams/{response_id}", "gateway-2").status_code == 200
    for key in (response_key(response_id), log_key(second.request_id), reader_key(response_id)):
        assert 0 < client.ttl(key) <= LOG_TTL_S, key


@pytest.fixture
def keyed(deployment: Deployment, own: Backstage, tmp_path: Path) -> Iterator[tuple[Deployment, dict[str, str]]]:
    """A gateway at which each of two tenants may hold LIMIT bytes; their keys by name."""
    path = tmp_path / "keys.json"
    keys = {name: add_key(path, name) for name in ("greedy", "other")}
    start_gateways(deployment, keys_file=path, max_held_size=LIMIT)
    yield deployment, keys


def test_a_tenant_that_stores_much_is_refused_and_others_are_not(
    keyed: tuple[Deployment, dict[str, str]], own: Backstage
) -> None:
    deployment, keys = keyed

    def stored(name: str, size: int = 300_000) -> httpx.Response:
        reply = ask(deployment, "x" * size, keys[name], background=True, max_output_tokens=5)
        if reply.status_code == 200:
            own.write(own.take()[0], 1, finish=1)
        return reply

    first, second = (stored("greedy") for _ in range(2))
    refused = stored("greedy")
    assert (first.status_code, second.status_code, refused.status_code) == (200, 200, 429), refused.text
    assert refused.json()["error"]["code"] == "storage_limit_exceeded" and 0 < int(refused.headers["Retry-After"]) <= 60
    assert "store: false" in refused.json()["error"]["message"]
    assert stored("other").status_code == 200 == stored("greedy", 1000).status_code
    assert (
        ask(deployment, "x" * 2 * LIMIT, keys["greedy"], background=True).json()["error"]["code"]
        == "request_exceeds_limit"
    )
    with httpx.Client(trust_env=False) as http:
        assert (
            http.delete(
                f"{deployment.url()}/v1/responses/{first.json()['id']}", headers=bearer(keys["greedy"])
            ).status_code
            == 200
        )
    assert stored("greedy").status_code == 200, "there is room again"
    assert stored("greedy").status_code == 429
    own.client.delete(stored_key(second.json()["id"]))  # dropped early, or lost
    assert stored("greedy").status_code == 200, "what is no longer there does not count"
    for account in own.client.keys("held:*"):
        assert 0 < own.client.ttl(account) <= RUNNING_LOG_TTL_S


@contextmanager
def used(client: "redis.Redis", share: float) -> Iterator[None]:
    """While so much of Redis' memory limit is used."""
    client.config_set("maxmemory", int(memory_of(client.info("memory")).used / share))
    try:
        yield
    finally:
        client.config_set("maxmemory", 0)


def test_near_its_memory_limit_what_runs_ends_and_new_requests_come_again(
    deployment: Deployment, own: Backstage
) -> None:
    start_gateways(deployment)
    for number in range(64):  # in pieces: for seconds after a large one, the server keeps a buffer as large
        own.client.set(
            f"ballast:{number}", b"x" * (1 << 20), ex=600
        )  # beside all this, connections and their buffers do not count
    with begun(deployment, own, 1) as (stream, request), used(own.client, 0.9):
        [problem] = wait_until(
            lambda: deployment.get("/health").json()["problems"], description="the gateway has noticed"
        )
        assert "redis is nearly full" in problem and deployment.get("/ready").status_code == 200, (
            "resuming and reading go on"
        )
        refused = deployment.post("/v1/completions", WHOLE)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "redis_nearly_full") and int(
            refused.headers["Retry-After"]
        ) > 0
        own.write(request, *range(2, 50), finish=49)
        stream.wait_end()
        assert stream.finish_reasons == ["length"]
    wait_until(lambda: deployment.get("/health").json()["status"] == "ok", description="there is room again")
    with begun(deployment, own, 1) as (stream, request):
        own.end(request)


def test_the_embedded_server_has_a_memory_limit_and_evicts_nothing(tmp_path: Path, redis_binary: Path | None) -> None:
    assert 0 < default_memory() < total_host_memory()
    process = start_server(tmp_path, max_memory=default_memory(), binary=redis_binary)
    try:
        url = f"unix://{socket_path(tmp_path)}"
        wait_until(lambda: answers(url), description="redis answers")
        with redis.Redis.from_url(url) as client:
            assert memory_of(client.info("memory")).limit == default_memory()
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
    finally:
        process.kill()
        process.wait()
