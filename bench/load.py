"""A load generator: streams of completions, each on a plain socket of its own.

What comes is kept as it is, with the time at which it came, and looked at when all is over: a
client that parses every event in Python would take more of the cores than the gateway does.
"""

import asyncio
import json
import statistics
import time
from dataclasses import dataclass

import uvloop


@dataclass(frozen=True, slots=True)
class Load:
    seconds: float  # from the first submission to the last byte
    ttft_s: float  # to a stream's first event, the median
    cpu: float  # s, that generating the load took


class Stream(asyncio.Protocol):
    """One request and what comes back."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.arrivals: list[tuple[float, bytes]] = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.sent_at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.sent_at = time.perf_counter()
        transport.write(self.request)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self.arrivals.append((time.perf_counter(), data))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if not self.ended.done():  # else it was given up
            self.ended.set_result(None)

    @property
    def received(self) -> bytes:
        return b"".join(data for _, data in self.arrivals)

    @property
    def first_at(self) -> float:
        """When its first event came."""
        return next((at for at, data in self.arrivals if b"data:" in data), self.sent_at)


def generate(port: int, model: str, prompts: list[list[int]], num_tokens: int) -> Load:
    """All prompts at once, greedily and whatever the tokens. Raises SystemExit for a stream that is not whole."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(
            stream_all([(port, make_request(model, prompt, num_tokens)) for prompt in prompts], num_tokens)
        )


async def stream_all(requests: list[tuple[int, bytes]], num_tokens: int, at_once: int | None = None) -> Load:
    """requests: each with its port; at_once: how many may be under way, by default all."""
    places = asyncio.Semaphore(at_once or len(requests))

    async def stream(port: int, request: bytes) -> Stream:
        async with places:
            _, made = await asyncio.get_running_loop().create_connection(lambda: Stream(request), "127.0.0.1", port)
            await made.ended
            return made

    started, cpu = time.perf_counter(), time.process_time()
    streams = await asyncio.gather(*(stream(port, request) for port, request in requests))
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    for each in streams:
        check(each.received, num_tokens)
    return Load(seconds, statistics.median(each.first_at - each.sent_at for each in streams), cpu)


def make_request(
    model: str, prompt: list[int] | str, num_tokens: int, temperature: float = 0.0, *, is_chat: bool = False
) -> bytes:
    """The bytes of a request: a completion of the prompt, or a conversation that it begins."""
    asked: dict[str, object] = {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}
    body = {
        "model": model,
        **asked,
        "max_tokens": num_tokens,
        "temperature": temperature,
        "ignore_eos": True,
        "stream": True,
    }
    body["stream_options"] = {"include_position": True}
    return post("localhost", "/v1/chat/completions" if is_chat else "/v1/completions", body)


def post(host: str, path: str, body: dict[str, object]) -> bytes:
    """The bytes of a request after whose answer the server closes the connection."""
    packed = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: "
        f"{len(packed)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + packed


def check(received: bytes, num_tokens: int) -> None:
    """An event's id is the position of its token: the last is there, and then the end."""
    is_whole = (
        received.startswith(b"HTTP/1.1 200 ")
        and b"id: %d\n" % num_tokens in received
        and b"data: [DONE]" in received[-64:]
    )
    if not is_whole:
        raise SystemExit(f"an incomplete stream: {received[:300]!r} … {received[-300:]!r}")
