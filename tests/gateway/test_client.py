"""The gateway's Redis client, for the tasks that use it."""

import asyncio

from services.requests.store.client import connect
from shared.process.settings import GatewaySettings

MOMENTS = 60  # turns of the event loop, in which a task has sent some commands


def test_a_task_that_is_cancelled_ends_whatever_it_was_at(redis_url: str) -> None:
    """Between a command's first byte and the last of its reply, at every turn of the event loop."""
    lost = []

    async def ask_for_ever() -> None:
        while True:
            await client.ping()

    async def cancel_at(turn: int) -> None:
        task = asyncio.create_task(ask_for_ever())
        for _ in range(turn):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task}, timeout=1)
        if not task.done():
            lost.append(turn)
        while not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=0.01)

    async def run() -> None:
        await client.ping()
        for turn in range(MOMENTS):
            await cancel_at(turn)
        await client.aclose()

    client = connect(GatewaySettings(redis_url=redis_url))
    asyncio.run(run())
    assert lost == []
