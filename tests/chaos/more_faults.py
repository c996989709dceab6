"""Faults of clocks, of a KV cache that is too small, of its file on disk, and of keys that change."""

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from services.requests.store.tenants.api_keys import add_key, revoke_key, rotate_key
from tests.chaos.arena import Arena
from tests.chaos.cluster import Slot
from tests.chaos.http_client import Broken, ask
from tests.chaos.store import NAME as REDIS

Run = Callable[[Arena, random.Random], Awaitable[None]]

JUMPS_S = (90.0, 3600.0, 86400.0)
TINY_CACHE = "2MiB"
NUM_ROTATIONS = 4
KEY_TIMEOUT_S = 5.0  # in which a gateway must know of a changed key
MODELS = "/v1/models"


def jump(direction: int) -> Run:
    """The wall clocks of everybody, of Redis alone, or of one process, go wrong for some seconds,
    and then right again.
    """

    async def run(arena: Arena, rng: random.Random) -> None:
        clocks = arena.cluster.clocks
        assert clocks is not None
        everybody = [REDIS, *(slot.name for slot in arena.cluster.slots)]
        names = rng.choice([everybody, [REDIS], [rng.choice(everybody[1:])]])
        seconds = direction * rng.choice(JUMPS_S)
        try:
            for name in names:
                clocks.set(name, seconds)
            await asyncio.sleep(rng.uniform(2, 8))
        finally:
            for name in names:
                clocks.set(name, 0)

    return run


async def starve_compute(arena: Arena, rng: random.Random) -> None:
    """Every compute comes back with a KV cache for a few sequences, and later with its own: most of
    the load is preempted, or waits.
    """
    for overrides in ({"kv_cache_memory": TINY_CACHE}, {}):
        for slot in arena.cluster.of("compute"):
            slot.overrides = overrides
            arena.cluster.kill(slot)
        if overrides:
            await asyncio.sleep(rng.uniform(5, 12))


async def flip_kv_disk(arena: Arena, rng: random.Random) -> None:
    """Change bytes of the file of --kv-disk while computes use it, its own notes among them; then kill a
    compute, whose successor opens the file.
    """
    for path in kv_files(arena):
        with path.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            for _ in range(rng.choice((20, 2000, 20_000)) if size else 0):
                file.seek(int(size * rng.random() ** 4))  # more of them in front, where the notes are
                file.write(rng.randbytes(1))
        await asyncio.sleep(rng.uniform(0, 2))
    arena.cluster.kill(rng.choice(arena.cluster.of("compute")))


async def cut_kv_disk(arena: Arena, rng: random.Random) -> None:
    """Cut the file of --kv-disk off somewhere, or remove it; then kill a compute, whose successor opens
    or makes it.
    """
    for path in kv_files(arena):
        if rng.random() < 0.3:
            path.unlink(missing_ok=True)
        else:
            os.truncate(path, int(path.stat().st_size * rng.random()))
        await asyncio.sleep(rng.uniform(0, 2))
    arena.cluster.kill(rng.choice(arena.cluster.of("compute")))


def kv_files(arena: Arena) -> list[Path]:
    folder, _, _ = arena.cluster.options.compute["kv_disk"].rpartition(",")
    return sorted(Path(folder).iterdir())


async def change_keys(arena: Arena, rng: random.Random) -> None:
    """Another tenant's key is made, rotated and revoked while the load goes on. No gateway takes an
    old key, or none at all, whatever the file is.
    """
    path, name = arena.cluster.keys_file, f"other-{rng.randrange(1 << 32):x}"
    old = add_key(path, name)
    await expect(arena, old, 200, "a new key")
    for _ in range(NUM_ROTATIONS):
        new = rotate_key(path, name)
        await expect(arena, new, 200, "a rotated key")
        await expect(arena, old, 401, "the key before")
        old = new
    revoke_key(path, name)
    await expect(arena, old, 401, "a revoked key")
    await expect(arena, "", 401, "no key")


async def expect(arena: Arena, key: str, status: int, what: str) -> None:
    """Every gateway that answers says so, at the latest after a moment."""
    for slot in arena.cluster.of("gateway"):
        deadline = time.monotonic() + KEY_TIMEOUT_S
        while (found := await status_of(slot, key)) not in (status, None):
            if time.monotonic() > deadline and slot.stopped_since is None:
                arena.history.find(
                    f"change-keys: {KEY_TIMEOUT_S:g} s later {slot.name} answers {found} to {what}, not {status}"
                )
                return
            await asyncio.sleep(0.05)


async def status_of(slot: Slot, key: str) -> int | None:
    """None: the gateway is away, or can't serve now."""
    try:
        reply = await asyncio.wait_for(
            ask(slot.port, "GET", MODELS, headers={"Authorization": f"Bearer {key}"} if key else {}), KEY_TIMEOUT_S
        )
    except (Broken, TimeoutError):
        return None
    reply.close()
    return None if reply.status >= 500 else reply.status
