"""Faults of Redis: dead, stopped, full, read-only, busy, empty, cut, replaced. One at a time: each
holds the store's lock.
"""

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import redis

from tests.chaos.arena import Arena

REDIS_ERRORS = (redis.RedisError, OSError)
MAX_CUT = 40_000  # bytes off the end of the append-only file
ROOM = 1 << 16  # bytes that are left of a memory or a disk
DEAD_ADDRESS = ("127.0.0.1", 1)
# It ends by itself: one that only SCRIPT KILL ends would run for ever should its client, who gave
# up and asked again, come after that
BUSY_SCRIPT = "local began = os.clock() while os.clock() - began < tonumber(ARGV[1]) do end"
BUSY_AFTER_MS = 100


@asynccontextmanager
async def in_hands(arena: Arena) -> AsyncIterator[Any]:
    """A client of a Redis that nobody else disturbs; and healed afterwards, whatever happened."""
    async with arena.store.lock:
        try:
            async with arena.store.client() as client:
                yield client
        finally:
            await arena.store.heal()


async def kill(arena: Arena, rng: random.Random) -> None:
    async with arena.store.lock:
        arena.store.kill()
        try:
            await asyncio.sleep(rng.choice([0.0, rng.uniform(0.1, 5)]))
        finally:
            await arena.store.start()


async def stop(arena: Arena, rng: random.Random) -> None:
    async with arena.store.lock:
        arena.store.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(rng.choice([rng.uniform(0.5, 3), rng.uniform(3, 12)]))
        finally:
            arena.store.signal(signal.SIGCONT)


async def cut_log(arena: Arena, rng: random.Random) -> None:
    async with arena.store.lock:
        arena.store.kill()
        try:
            arena.store.cut(rng.randrange(1, MAX_CUT))
            await asyncio.sleep(rng.uniform(0, 2))
        finally:
            await arena.store.start()


async def readonly(arena: Arena, rng: random.Random) -> None:
    async with in_hands(arena) as client:
        await client.execute_command("REPLICAOF", *DEAD_ADDRESS)
        await asyncio.sleep(rng.uniform(0.3, 6))


async def no_replicas(arena: Arena, rng: random.Random) -> None:
    async with in_hands(arena) as client:
        await client.config_set("min-replicas-to-write", 1)
        await asyncio.sleep(rng.uniform(0.3, 6))


async def out_of_memory(arena: Arena, rng: random.Random) -> None:
    async with in_hands(arena) as client:
        await client.config_set("maxmemory", 1)
        await asyncio.sleep(rng.uniform(0.3, 6))


async def fill_memory(arena: Arena, rng: random.Random) -> None:
    """Little room, which the load itself uses up: some writes are still taken, others are not."""
    async with in_hands(arena) as client:
        await client.config_set("maxmemory", (await client.info("memory"))["used_memory"] + ROOM)
        await asyncio.sleep(rng.uniform(1, 8))


async def fill_disk(arena: Arena, rng: random.Random) -> None:
    """The append-only file can't grow, as on a full disk: MISCONF."""
    async with in_hands(arena):
        arena.store.limit_files(rng.randrange(ROOM))
        await asyncio.sleep(rng.uniform(1, 8))


async def promote_replica(arena: Arena, rng: random.Random) -> None:
    async with in_hands(arena):
        await arena.store.promote_replica(rng.uniform(0.1, 3))


async def busy(arena: Arena, rng: random.Random) -> None:
    async with in_hands(arena) as client:
        await client.config_set("busy-reply-threshold", BUSY_AFTER_MS)
        with suppress(*REDIS_ERRORS):
            await client.eval(BUSY_SCRIPT, 0, str(rng.uniform(0.5, 4)))


async def drop_connections(arena: Arena, rng: random.Random) -> None:
    async with in_hands(arena) as client:
        await client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


async def flush_scripts(arena: Arena, rng: random.Random) -> None:
    async with in_hands(arena) as client:
        await client.script_flush()


async def flush_all(arena: Arena, rng: random.Random) -> None:
    async with in_hands(arena) as client:
        await client.flushall()
