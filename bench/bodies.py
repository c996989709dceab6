"""How long does one client's body stall everybody else? The longest wait of a small request while bodies of the worst shapes are sent.

Method: a gateway with an empty pipeline behind it. One connection asks for /v1/models, which needs nothing but the event loop, over and over; meanwhile
another sends the same body REPEATS times. Reported by shape, in ms: the longest answer to the small request, and the median time of the body's. The machine's
cores are shared by gateway, helper process and this program: what the kernel's scheduler adds is in the figures. "nothing" is the same without a body.

    python -m bench.bodies [--bytes 8388608] [--url http://127.0.0.1:8000]
"""

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

REPEATS = 5
HEAD = b'{"model":"paper",'
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def filled(size: int, head: bytes, item: bytes, tail: bytes, separator: bytes = b",") -> bytes:
    """head, as many items as fit into size bytes, tail."""
    count = max(1, (size - len(head) - len(tail)) // (len(item) + len(separator)))
    return head + separator.join([item] * count) + tail


def keys(size: int, head: bytes, tail: bytes) -> bytes:
    return head + b",".join(b'"%07d":0' % number for number in range((size - len(head) - len(tail)) // 12)) + tail


def shapes(size: int) -> Iterator[tuple[str, str, bytes]]:
    """Name, path and body; every body is wrong somewhere, or is of a model that does not exist, so that none is submitted."""
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
    yield "deep lists", COMPLETIONS, filled(size, HEAD + b'"x":[', b"[" * 1000 + b"]" * 1000, b"]}")
    yield "logit_bias", COMPLETIONS, keys(size, HEAD + b'"prompt":"x","logit_bias":{', b"}}")
    yield "stop", COMPLETIONS, filled(size, HEAD + b'"prompt":"x","stop":[', b'"a"', b"]}")
    yield "short messages", CHAT, filled(size, HEAD + b'"messages":[', b'{"role":"user","content":"a"}', b"]}")
    yield "4096 messages", CHAT, filled(size, HEAD + b'"messages":[', message, b"]}")
    yield "wrong messages", CHAT, filled(size, HEAD + b'"messages":[', b"{}", b"]}")
    yield "a message of parts", CHAT, filled(size, HEAD + b'"messages":[{"role":"user","content":[', b'{"type":"text","text":""}', b"]}]}")
    yield "a message of unknown fields", CHAT, keys(size, HEAD + b'"messages":[{', b"}]}")
    yield "options of unknown fields", CHAT, keys(size, HEAD + b'"stream_options":{', b"}}")


async def longest_wait(client: httpx.AsyncClient, url: str, stop: asyncio.Event) -> float:
    """The longest answer to a small request, in ms, until told to stop."""
    longest = 0.0
    while not stop.is_set():
        started_at = time.perf_counter()
        (await client.get(url + "/v1/models")).raise_for_status()
        longest = max(longest, time.perf_counter() - started_at)
    return 1000 * longest


async def measure(url: str, path: str, body: bytes) -> tuple[float, float]:
    """Longest wait of others, median time of this body, in ms."""
    async with httpx.AsyncClient(timeout=120, trust_env=False) as client, httpx.AsyncClient(timeout=120, trust_env=False) as sender:
        stop = asyncio.Event()
        await client.get(url + "/v1/models")
        probing = asyncio.create_task(longest_wait(client, url, stop))
        times = []
        for _ in range(REPEATS):
            started_at = time.perf_counter()
            if body:
                reply = await sender.post(url + path, content=body, headers={"Content-Type": "application/json"})
                assert reply.status_code in (400, 404, 503), reply.text[:200]
            else:
                await asyncio.sleep(0.2)
            times.append(time.perf_counter() - started_at)
        stop.set()
        return await probing, 1000 * statistics.median(times)


def run(url: str, size: int) -> dict[str, float]:
    results = {}
    print(f"{'shape':30} {'others waited, ms':>18} {'this took, ms':>14}")
    for name, path, body in [("nothing", "", b""), *shapes(size)]:
        waited, took = asyncio.run(measure(url, path, body))
        results[name] = round(waited, 1)
        print(f"{name:30} {waited:18.1f} {took:14.1f}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=8 << 20, help="size of a body")
    parser.add_argument("--url", help="a gateway that runs already; by default one is started, with a Redis of its own")
    arguments = parser.parse_args()
    if arguments.url:
        results = run(arguments.url, arguments.bytes)
    else:
        from tests.conftest import running_redis
        from tests.deployment import Deployment
        from tests.waiting import wait_until

        with tempfile.TemporaryDirectory() as folder, running_redis(Path(folder) / "redis", None) as redis_url:
            deployment = Deployment(redis_url, Path(folder))
            deployment.start("gateway")
            try:
                wait_until(lambda: deployment.get("/v1/models").status_code == 200, description="the gateway answers")
                results = run(deployment.url(), arguments.bytes)
            finally:
                deployment.stop()
    print(json.dumps({"bench": "bodies", "bytes": arguments.bytes, "longest_wait_ms": results}))


if __name__ == "__main__":
    main()
