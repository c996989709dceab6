"""How long does one client's body stall everybody else? The longest wait of a small request while
bodies of the worst shapes are sent.

Method: a gateway with a pipeline behind it that fails whatever it gets. One connection asks for
/v1/models, which needs nothing but the event loop, over and over; meanwhile another sends the same
body REPEATS times. By shape, in ms: the longest answer to the small request, of the best of those
times and of the worst, and the median time of the body's own. The stall that a body causes is in
each of them, and what the kernel's scheduler adds (gateway, helper process, Redis and this program
share the cores) is not: so the best is the estimate. "nothing" is the same without a body.

    python -m bench.bodies [--bytes 8388608] [--url http://127.0.0.1:8000]
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import redis

from shared.wire.messages import RequestError
from shared.wire.streams import GATEWAY_ID, REQUEST_ID, requests
from shared.wire.token_log import end_request
from tests.conftest import running_redis
from tests.deployment import Deployment
from tests.gateway.backstage import NAME, Backstage
from tests.waiting import wait_until

REPEATS = 5
HEAD = b'{"model":"paper","max_tokens":1,'
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def filled(size: int, head: bytes, item: bytes, tail: bytes, separator: bytes = b",") -> bytes:
    """head, as many items as fit into size bytes, tail."""
    count = max(1, (size - len(head) - len(tail)) // (len(item) + len(separator)))
    return head + separator.join([item] * count) + tail


def keys(size: int, head: bytes, tail: bytes) -> bytes:
    return head + b",".join(b'"%07d":0' % number for number in range((size - len(head) - len(tail)) // 12)) + tail


def shapes(size: int) -> Iterator[tuple[str, str, bytes]]:
    """Name, path and body. Those that are right are submitted, and fail at once."""
    row = filled(max(30, size // 128), b"[", b"1", b"]")
    message = b'{"role":"user","content":"%b"}' % (b"a" * max(1, size // 4096 - 32))
    yield "token ids", COMPLETIONS, filled(size, HEAD + b'"prompt":[', b"1", b"]}")
    yield "token ids, the last wrong", COMPLETIONS, filled(size, HEAD + b'"prompt":[', b"1", b',"x"]}')
    yield "token ids, all wrong", COMPLETIONS, filled(size, HEAD + b'"prompt":[1,', b'"x",1.5', b"]}")
    yield "lists of token ids", COMPLETIONS, filled(size, HEAD + b'"prompt":[', row, b"]}")
    yield "a million lists", COMPLETIONS, filled(size, HEAD + b'"prompt":[', b"[1]", b"]}")
    yield "one text", COMPLETIONS, filled(size, HEAD + b'"prompt":"', b"a", b'"}', b"")
    yield "one text, beyond ASCII", COMPLETIONS, filled(size, HEAD + b'"prompt":"\xf0\x9f\x98\x80', b"a", b'"}', b"")
    yield "texts", COMPLETIONS, filled(size, HEAD + b'"prompt":[', b'"a"', b"]}")
    yield "unknown fields", COMPLETIONS, keys(size, HEAD, b"}")
    yield "empty lists", COMPLETIONS, filled(size, HEAD + b'"x":[', b"[]", b"]}")
    yield "one text, 8 choices", COMPLETIONS, filled(size, HEAD + b'"n":8,"prompt":"', b"a", b'"}', b"")
    yield "deep lists", COMPLETIONS, filled(size, HEAD + b'"x":[', b"[" * 1000 + b"]" * 1000, b"]}")
    yield "logit_bias", COMPLETIONS, keys(size, HEAD + b'"prompt":"x","logit_bias":{', b"}}")
    yield "stop", COMPLETIONS, filled(size, HEAD + b'"prompt":"x","stop":[', b'"a"', b"]}")
    yield "short messages", CHAT, filled(size, HEAD + b'"messages":[', b'{"role":"user","content":"a"}', b"]}")
    yield "4096 messages", CHAT, filled(size, HEAD + b'"messages":[', message, b"]}")
    yield "wrong messages", CHAT, filled(size, HEAD + b'"messages":[', b"{}", b"]}")
    yield (
        "a message of parts",
        CHAT,
        filled(size, HEAD + b'"messages":[{"role":"user","content":[', b'{"type":"text","text":""}', b"]}]}"),
    )
    yield "a message of unknown fields", CHAT, keys(size, HEAD + b'"messages":[{', b"}]}")
    yield "options of unknown fields", CHAT, keys(size, HEAD + b'"stream_options":{', b"}}")


class Probe:
    """Asks for something small, again and again."""

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self.client = client
        self.url = url + "/v1/models"
        self.longest_ms = 0.0

    async def run(self) -> None:
        while True:
            started_at = time.perf_counter()
            (await self.client.get(self.url)).raise_for_status()
            self.longest_ms = max(self.longest_ms, 1000 * (time.perf_counter() - started_at))


async def measure(url: str, path: str, body: bytes, *, repeats: int = REPEATS) -> tuple[float, float, float]:
    """Others' longest wait at best and at worst, and the median time of this body, in ms."""
    async with (
        httpx.AsyncClient(timeout=120, trust_env=False) as client,
        httpx.AsyncClient(timeout=120, trust_env=False) as sender,
    ):
        probe = Probe(client, url)
        await client.get(probe.url)
        probing = asyncio.create_task(probe.run())
        waits, times = [], []
        for _ in range(repeats):
            await asyncio.sleep(0.02)
            probe.longest_ms = 0.0
            started_at = time.perf_counter()
            if body:
                reply = await sender.post(url + path, content=body, headers={"Content-Type": "application/json"})
                assert reply.status_code in (400, 404, 500), reply.text[:200]
            else:
                await asyncio.sleep(0.2)
            times.append(1000 * (time.perf_counter() - started_at))
            await asyncio.sleep(0.02)
            waits.append(probe.longest_ms)
        probing.cancel()
        return min(waits), max(waits), statistics.median(times)


def fail_all(redis_url: str, stopping: threading.Event) -> None:
    """Play the pipeline: whatever is submitted fails. Looks at the ids only: the prompts are long,
    and this is one process with the client.
    """
    client = redis.Redis.from_url(redis_url)
    while not stopping.wait(0.005):
        found: Any = client.xrange(requests(NAME).key, count=1)
        for entry_id, values in found:
            pipe = client.pipeline(transaction=False)
            end_request(
                pipe, NAME, values[REQUEST_ID].decode(), values[GATEWAY_ID].decode(), error=RequestError("measured")
            )
            pipe.xdel(requests(NAME).key, entry_id)
            pipe.execute()


def run(url: str, size: int) -> dict[str, float]:
    results = {}
    print(f"{'shape':30} {'others waited: best':>20} {'worst':>8} {'this took':>10}  (ms)")
    for name, path, body in [("nothing", "", b""), *shapes(size)]:
        best, worst, took = asyncio.run(measure(url, path, body))
        results[name] = round(best, 1)
        print(f"{name:30} {best:20.1f} {worst:8.1f} {took:10.1f}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=8 << 20, help="size of a body")
    parser.add_argument("--url", help="a gateway that runs already; by default one is started, with a Redis of its own")
    arguments = parser.parse_args()
    if arguments.url:
        results = run(arguments.url, arguments.bytes)
    else:
        with tempfile.TemporaryDirectory() as folder, running_redis(Path(folder) / "redis", None) as redis_url:
            deployment, backstage, stopping = (
                Deployment(redis_url, Path(folder)),
                Backstage(redis_url),
                threading.Event(),
            )
            failing = threading.Thread(target=fail_all, args=(redis_url, stopping))
            failing.start()
            deployment.start("gateway", max_tokens_in_flight=100_000_000)
            try:
                wait_until(lambda: deployment.get("/ready").status_code == 200, description="the gateway is ready")
                results = run(deployment.url(), arguments.bytes)
            finally:
                stopping.set()
                failing.join()
                deployment.stop()
                backstage.close()
    print(json.dumps({"bench": "bodies", "bytes": arguments.bytes, "longest_wait_ms": results}))


if __name__ == "__main__":
    main()
