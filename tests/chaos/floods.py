"""The floods of fairness.py: what one tenant asks for, again and again, until the process is ended.

    python -m tests.chaos.floods NAME URL KEY

It is a process of its own and of the lowest priority: such clients have machines of their own, and
what they take of this one would be charged to the server.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import httpx

from tests.deployment import MODEL

LONGEST_S = 120.0  # for one request
MAX_REQUESTS = 1024  # of the pipeline, by default
REST_S = 0.2  # of a flooder that was refused


async def again_and_again(client: httpx.AsyncClient, method: str, path: str, body: Any) -> None:
    """Asks as one of a flood's clients until it is cancelled, and is hardly put off."""
    while True:
        with suppress(httpx.HTTPError):
            reply = await client.request(method, path, json=body, timeout=LONGEST_S)
            if reply.status_code == 200:
                continue
        await asyncio.sleep(REST_S)


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Once", "max_tokens": 200, "ignore_eos": True, "temperature": 1.0, **fields}


async def complete(client: httpx.AsyncClient, bodies: list[dict[str, Any]]) -> None:
    """A client for each of them."""
    await asyncio.gather(*(again_and_again(client, "POST", "/v1/completions", body) for body in bodies))


async def many(client: httpx.AsyncClient) -> None:
    await complete(client, [completion(prompt=f"Once {number}") for number in range(150)])


async def beyond(client: httpx.AsyncClient) -> None:
    """More than the pipeline takes at all: whoever comes next may be told to come again."""
    await complete(client, [completion(prompt=f"Beyond {number}", n=8) for number in range(MAX_REQUESTS // 8 + 40)])


async def choices(client: httpx.AsyncClient) -> None:
    await complete(client, [completion(prompt=f"Once {number}", n=8) for number in range(60)])


async def long(client: httpx.AsyncClient) -> None:
    """Prompts of half the window, which begin like nothing that is cached."""
    await complete(
        client,
        [
            completion(prompt=f"{number} " + "and the water rose in the lock " * 60, max_tokens=4)
            for number in range(100)
        ],
    )


async def read(client: httpx.AsyncClient) -> None:
    """One stored response, read by hundreds over and over."""
    body = {
        "model": MODEL,
        "input": "What is a lock?",
        "max_output_tokens": 400,
        "ignore_eos": True,
        "background": True,
    }
    stored = (await client.post("/v1/responses", json=body, timeout=LONGEST_S)).json()
    path = f"/v1/responses/{stored['id']}?stream=true"
    await asyncio.gather(*(again_and_again(client, "GET", path, None) for _ in range(400)))


async def batch(client: httpx.AsyncClient) -> None:
    """Batches of 2,000 lines, one after another."""
    lines = [
        {
            "custom_id": f"{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": completion(prompt=f"Line {number}"),
        }
        for number in range(2000)
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    while True:
        file = (
            await client.post(
                "/v1/files", files={"file": ("lines.jsonl", content)}, data={"purpose": "batch"}, timeout=LONGEST_S
            )
        ).json()
        wanted = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        await client.post("/v1/batches", json=wanted, timeout=LONGEST_S)
        await asyncio.sleep(LONGEST_S)


FLOODS: dict[str, Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]]] = {
    "many": many,
    "n": choices,
    "beyond": beyond,
    "long": long,
    "read": read,
    "batch": batch,
}


async def flood(name: str, url: str, key: str) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=url, headers={"Authorization": f"Bearer {key}"}, limits=limits, trust_env=False
    ) as client:
        await FLOODS[name](client)


if __name__ == "__main__":
    os.nice(19)
    asyncio.run(flood(*sys.argv[1:]))
