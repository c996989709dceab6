"""Do the faults of the run's own Redis do what they say? With a real server."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import redis

from tests.chaos.store import Store


def with_store(folder: Path, test: Callable[[Store], Awaitable[None]]) -> None:
    async def run() -> None:
        store = Store(folder / "redis")
        await store.start()
        try:
            await test(store)
        finally:
            store.kill()

    asyncio.run(run())


async def get(store: Store, key: str) -> bytes | None:
    async with store.client() as client:
        value: bytes | None = await client.get(key)
    return value


async def put(store: Store, key: str, value: str) -> None:
    async with store.client() as client:
        await client.set(key, value)


def test_a_promoted_replica_has_what_was_written_before_its_lag_and_nothing_since(tmp_path: Path) -> None:
    async def test(store: Store) -> None:
        await put(store, "before", "1")

        async def write_when_cut_off() -> None:
            async with store.client() as primary:
                while not (await primary.info("replication"))["connected_slaves"]:
                    await asyncio.sleep(0.01)
                while (await primary.info("replication"))["connected_slaves"]:
                    await asyncio.sleep(0.01)
                await primary.set("since", "1")

        path = store.socket
        await asyncio.gather(store.promote_replica(lag_s=2.0), write_when_cut_off())
        assert store.socket == path
        assert await get(store, "before") == b"1"
        assert await get(store, "since") is None
        await put(store, "after", "1")
        store.kill()
        await store.start()  # over the promoted one's own files
        assert await get(store, "before") == await get(store, "after") == b"1"

    with_store(tmp_path, test)


def test_a_full_disk_refuses_writes_and_does_not_kill(tmp_path: Path) -> None:
    async def test(store: Store) -> None:
        await put(store, "before", "1")
        store.limit_files(0)
        with pytest.raises(redis.ResponseError, match="MISCONF"):
            while True:  # the server writes once a turn of its loop, and says so from the next command on
                await put(store, "x", "y" * 1000)
        await store.heal()
        async with store.client() as client:
            while (await client.info("persistence"))["aof_last_write_status"] != "ok":
                await asyncio.sleep(0.05)
        await put(store, "after", "1")
        assert await get(store, "before") == b"1"

    with_store(tmp_path, test)
