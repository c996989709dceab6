"""Reading again costs its reader, not others: places of his own, a price in requests a minute, and
so many streams that follow.
"""

import asyncio
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway.generation.places import MAX_FOLLOWERS_OF_ONE
from services.requests.store.tenants.api_keys import add_key
from tests.deployment import Deployment
from tests.gateway.backstage import NAME, Backstage
from tests.gateway.conftest import start_gateways
from tests.gateway.streams import BODY
from tests.gateway.test_access import bearer

WHOLE = BODY | {"stream": False, "stream_options": None}
NUM_TOKENS, NUM_READS, MAX_ROUNDS = 600, 60, 10


@pytest.fixture
def keyed(deployment: Deployment, own: Backstage, tmp_path: Path) -> Iterator[tuple[Deployment, dict[str, str]]]:
    path = tmp_path / "keys.json"
    keys = {name: add_key(path, name) for name in ("greedy", "other")} | {
        "slow": add_key(path, "slow", requests_per_minute=2)
    }
    start_gateways(deployment, keys_file=path)
    yield deployment, keys


def background(deployment: Deployment, key: str, **fields: Any) -> httpx.Response:
    body = {"model": NAME, "input": "x", "background": True, "max_output_tokens": 4000} | fields
    return httpx.post(deployment.url() + "/v1/responses", json=body, headers=bearer(key), timeout=60, trust_env=False)


def test_who_reads_much_waits_for_himself(keyed: tuple[Deployment, dict[str, str]], own: Backstage) -> None:
    deployment, keys = keyed
    response_id = background(deployment, keys["greedy"]).json()["id"]
    [request] = own.take()
    pipe = own.client.pipeline(transaction=False)
    own.queue(pipe, request, *range(1, NUM_TOKENS + 1))  # it runs: what has ended would be read once
    pipe.execute()

    async def ask() -> int:
        """How many of the reads ended before another tenant's request did, which came after all of them."""
        num_ended = 0
        async with httpx.AsyncClient(
            base_url=deployment.url(), trust_env=False, timeout=300, limits=httpx.Limits(max_connections=None)
        ) as client:

            async def read() -> int:
                nonlocal num_ended
                reply = await client.get(f"/v1/responses/{response_id}", headers=bearer(keys["greedy"]))
                num_ended += 1
                return reply.status_code

            reads = [asyncio.create_task(read()) for _ in range(NUM_READS)]
            while not num_ended:
                await asyncio.sleep(0.01)
            asked = asyncio.create_task(client.post("/v1/completions", json=WHOLE, headers=bearer(keys["other"])))
            [other] = await asyncio.to_thread(own.take)
            own.write(other, 1, finish=1)
            assert (await asked).status_code == 200
            num_before = num_ended
            assert await asyncio.gather(*reads) == [200] * NUM_READS
            return num_before

    # where this process is held up, all may end before it sees so; behind them, the request would
    # never be earlier than their last
    assert any(asyncio.run(ask()) < NUM_READS / 2 for _ in range(MAX_ROUNDS)), (
        "the other tenant's request did not wait for the reads"
    )
    own.end(request)


def test_reads_count_against_the_requests_of_a_minute(keyed: tuple[Deployment, dict[str, str]], own: Backstage) -> None:
    deployment, keys = keyed
    response_id = background(deployment, keys["slow"]).json()["id"]
    with httpx.Client(base_url=deployment.url(), headers=bearer(keys["slow"]), trust_env=False, timeout=60) as client:
        replies: list[httpx.Response] = []
        while not replies or replies[-1].status_code == 200 and len(replies) < 100:
            replies.append(client.get(f"/v1/responses/{response_id}"))
    refused = replies.pop()
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded") and int(
        refused.headers["Retry-After"]
    ) > 0
    assert len(replies) >= 9, "a tenth of a request each"
    assert replies[0].headers["x-ratelimit-limit-requests"] == "2"
    own.end(own.take()[0])


def test_a_tenant_follows_so_many_streams_and_leaves_others_room(
    keyed: tuple[Deployment, dict[str, str]], own: Backstage
) -> None:
    deployment, keys = keyed
    ids = {name: background(deployment, keys[name]).json()["id"] for name in ("greedy", "other")}
    requests = own.take(2)

    async def follow() -> None:
        async with AsyncExitStack() as stack:
            limits = httpx.Limits(max_connections=None)
            client = await stack.enter_async_context(
                httpx.AsyncClient(base_url=deployment.url(), trust_env=False, timeout=120, limits=limits)
            )

            async def status(name: str) -> int:
                path = f"/v1/responses/{ids[name]}?stream=true"
                return (
                    await stack.enter_async_context(client.stream("GET", path, headers=bearer(keys[name])))
                ).status_code

            assert (
                await asyncio.gather(*(status("greedy") for _ in range(MAX_FOLLOWERS_OF_ONE)))
                == [200] * MAX_FOLLOWERS_OF_ONE
            )
            assert (await status("greedy"), await status("other")) == (429, 200)
            refused = await client.post(
                "/v1/responses",
                json={"model": NAME, "input": "x", "background": True, "stream": True},
                headers=bearer(keys["greedy"]),
            )
            assert refused.status_code == 429 and own.held() == 2, "nothing was begun"

    asyncio.run(follow())
    for request in requests:
        own.end(request)
