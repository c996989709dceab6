"""Partitions between a stage and Redis, and outages longer than the time-outs.

The long ones are made for compute's default reader time-out of 60 s. `--scale 0.15` shortens both.
Leases last 4 s and are not scaled, so a scaled time-out stays well above them.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from tests.chaos.arena import Arena
from tests.chaos.cluster import Slot

Run = Callable[[Arena, random.Random], Awaitable[None]]

SHORT_S, LONG_S = (0.5, 3.0), (3.0, 12.0)  # partitions, by turns of a coin
BLIND_S = 60.0  # the reader time-out
LONGER_S = 3.0  # than that, whatever it is scaled to: compute looks for readers once a second
AWAY_S, EARLIER_S = (
    8.0,
    5.0,
)  # a gateway's partition, longer than its lease; how long of it lies before compute sees again


@contextmanager
def partitioned(slots: list[Slot], mode: str) -> Iterator[None]:
    """These replicas' ways to Redis fail in this manner."""
    proxies = [slot.proxy for slot in slots if slot.proxy is not None]
    for proxy in proxies:
        proxy.begin(mode)
    try:
        yield
    finally:
        for proxy in proxies:
            proxy.heal()


def partition(mode: str, stage: str) -> Run:
    """Between one replica of the stage and Redis, or all of them."""

    async def run(arena: Arena, rng: random.Random) -> None:
        slots = arena.cluster.of(stage)
        with partitioned(slots if rng.random() < 0.3 else [rng.choice(slots)], mode):
            await asyncio.sleep(rng.uniform(*rng.choice([SHORT_S, LONG_S])))

    return run


def outage(seconds: float) -> Run:
    """Redis is dead for so long; its data is not lost."""

    async def run(arena: Arena, rng: random.Random) -> None:
        async with arena.store.lock:
            arena.store.kill()
            try:
                await asyncio.sleep(seconds * arena.cluster.options.scale)
            finally:
                await arena.store.start()

    return run


def blackout(seconds: float) -> Run:
    """Nobody reaches Redis for so long, and Redis lives: its clock of the leases goes on."""

    async def run(arena: Arena, rng: random.Random) -> None:
        with partitioned(arena.cluster.slots, "stall"):
            await asyncio.sleep(seconds * arena.cluster.options.scale)

    return run


async def blind_compute(arena: Arena, rng: random.Random) -> None:
    """Compute does not reach Redis for longer than its reader time-out; towards the end a gateway
    does not either, and its lease runs out.

    The gateway lives, and its clients read: nobody may cancel their requests.
    """
    gateway = rng.choice(arena.cluster.of("gateway"))
    with partitioned(arena.cluster.of("compute"), "stall"):
        await asyncio.sleep(BLIND_S * arena.cluster.options.scale + LONGER_S - EARLIER_S)
        away = asyncio.create_task(stay_away(gateway))
        await asyncio.sleep(EARLIER_S)
    await away


async def stay_away(gateway: Slot) -> None:
    with partitioned([gateway], "stall"):
        await asyncio.sleep(AWAY_S)
