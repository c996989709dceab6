"""Many streams at once, for tests that disturb them, and what compute says of its load."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import openai

from shared.wire.load import Load
from shared.wire.streams import inflight_key
from tests.deployment import MODEL, Deployment
from tests.waiting import wait_until

T = TypeVar("T")
MAX_ROUNDS = 5


async def stream_all(
    deployment: Deployment,
    count: int,
    *,
    max_tokens: int,
    disturb: Callable[[], Awaitable[None]] | None = None,
    in_flight: Sequence[Deployment] = (),
) -> list[str]:
    """`count` seeded streams at once; `disturb` runs when each of them has had its first tokens, and
    none has ended. Returns their texts. in_flight: the cells that answer, if there are several.

    Where this process is held up for longer than the streams take, it finds them over before it can
    disturb them: then it asks for them again.
    """
    async with deployment.async_client() as client:
        for _ in range(MAX_ROUNDS):
            begun = [asyncio.Event() for _ in range(count)]
            tasks = [
                asyncio.create_task(_stream(client, number, max_tokens, event)) for number, event in enumerate(begun)
            ]
            if disturb is None:
                return await asyncio.gather(*tasks)
            await asyncio.gather(*(event.wait() for event in begun))
            if sum(map(num_in_flight, in_flight or [deployment])) == count:
                await disturb()
                return await asyncio.gather(*tasks)
            await asyncio.gather(*tasks)
    raise AssertionError(f"{MAX_ROUNDS} times the streams were over before they could be disturbed")


async def _stream(client: openai.AsyncOpenAI, number: int, max_tokens: int, begun: asyncio.Event) -> str:
    text = ""
    try:
        stream = await client.completions.create(
            model=MODEL,
            prompt=f"Question {number}: the",
            temperature=0.9,
            seed=number,
            max_tokens=max_tokens,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            text += chunk.choices[0].text
            if len(text) > 10:
                begun.set()
        return text
    finally:
        begun.set()


def num_in_flight(deployment: Deployment) -> int:
    """Sequences that were admitted and have not ended, as Redis has them."""
    with deployment.redis() as client:
        return max(0, int(client.hlen(inflight_key(MODEL))) - 1)  # one field is their sum


def compute_load(deployment: Deployment) -> Load:
    """The one compute replica's last load; it announces one every second. A replica whose lease ran
    out on a machine that stood still is waited for.
    """
    [compute] = wait_until(lambda: deployment.registry().of("compute"), description="compute is in the registry")
    return compute.load


def catch(pool: ThreadPoolExecutor, ask: Callable[[], T], progress: Callable[[], float], more: float) -> "Future[T]":
    """A call of `ask` that is under way: `progress` has grown by `more` since it began. One that
    was over before this process saw that is made again.
    """
    for _ in range(MAX_ROUNDS):
        before, reply = progress(), pool.submit(ask)
        wait_until(
            lambda before=before, reply=reply: reply.done() or progress() > before + more, description="it is at it"
        )
        if not reply.done():
            return reply
    raise AssertionError(f"{MAX_ROUNDS} times it was over before it could be disturbed")
