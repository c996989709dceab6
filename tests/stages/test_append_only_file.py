"""A disk that was full for a while, and a crash afterwards: nothing that Redis had acknowledged is lost."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import redis

from services.requests.store.admission.append_only_file import AppendOnlyFile
from tests.chaos.store import Store

ROOM = 1000  # bytes that fit on the disk
VALUE = "v" * 300


async def persistence(client: Any, **wanted: Any) -> None:
    async with asyncio.timeout(30):
        while not wanted.items() <= (await client.info("persistence")).items():
            await asyncio.sleep(0.05)


async def fill_the_disk(store: Store, client: Any, name: str) -> None:
    """Some bytes still fit, then there is room again. Redis has opened the file in a rewrite."""
    store.limit_files(ROOM)
    with pytest.raises(redis.ResponseError, match="MISCONF"):
        for number in range(100):
            await client.set(f"{name}-{number}", VALUE)
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("num_times", [1, 3])
def test_nothing_is_lost_by_a_crash_after_a_full_disk(tmp_path: Path, num_times: int) -> None:
    async def test() -> None:
        store = Store(tmp_path / "redis", None)
        await store.start()
        try:
            async with store.client() as client:
                watched = AppendOnlyFile(client)
                await client.bgrewriteaof()
                await persistence(client, aof_rewrite_in_progress=0)
                for time in range(num_times):
                    await fill_the_disk(store, client, f"full-{time}")
                    await watched.look()
                    store.limit_files(-1)
                    await persistence(client, aof_last_write_status="ok")
                    await client.set(f"room-{time}", VALUE)
                    await watched.look()
                    await persistence(client, aof_rewrite_in_progress=0, aof_rewrite_scheduled=0)
                    await client.set(f"rewritten-{time}", VALUE)
                await asyncio.sleep(1.5)  # until it is on the disk
                before = await client.dbsize()
            store.kill()
            await store.start()
            async with store.client() as client:
                assert await client.dbsize() == before
        finally:
            store.kill()

    asyncio.run(test())


def test_a_redis_that_may_not_be_told_to_rewrite_is_an_error_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        store = Store(tmp_path / "redis", None)
        await store.start()
        try:
            async with store.client() as client:
                await client.acl_setuser(
                    "default", enabled=True, nopass=True, categories=["+@all"], commands=["-bgrewriteaof"], keys=["*"]
                )
                watched = AppendOnlyFile(client)
                watched.is_rewrite_due = True
                await watched.look()
                assert not watched.is_rewrite_due
        finally:
            store.kill()

    asyncio.run(test())
    assert "run BGREWRITEAOF before it restarts" in caplog.text
