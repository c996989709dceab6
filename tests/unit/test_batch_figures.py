"""Figures of batches as a whole, against a real Redis."""

import asyncio
import time
from pathlib import Path

import pytest
import redis.asyncio

from services.jobs.upkeep import queue_backlog
from services.requests.store.batches import store as stores
from services.requests.store.batches.figures import BatchFigures
from services.requests.store.batches.store import BatchRecord, BatchStore
from services.requests.store.tenants.tenant import EVERYBODY
from shared.wire.streams import BATCH_FIGURES, BATCHES_RUNNING
from tests.conftest import running_redis


def test_a_new_batch_does_not_have_the_age_of_one_that_ended(tmp_path: Path) -> None:
    async def ages(url: str) -> dict[str, float]:
        client, now = redis.asyncio.Redis.from_url(url), int(time.time())
        store = BatchStore(client)

        def record(batch_id: str, created_at: int) -> BatchRecord:
            return BatchRecord(batch_id, EVERYBODY, "/v1/completions", "file-x", "24h", created_at, created_at + 86400)

        old = await store.create(record("batch_a", now - 7200))
        async with client.pipeline() as pipe:  # a worker sweeps, and is stopped
            queue_backlog(pipe, [old])
            await pipe.execute()
        await store.move("batch_a", ("validating",), "cancelled")
        await store.create(record("batch_b", now))
        figures = BatchFigures.read(await client.scard(BATCHES_RUNNING), await client.hgetall(BATCH_FIGURES))  # type: ignore[arg-type]
        await client.aclose()
        return {sample.name: sample.value for family in figures.families() for sample in family.samples}

    with running_redis(tmp_path / "redis", None) as url:
        found = asyncio.run(ages(url))
    assert found["penstock_batch_oldest_seconds"] < 60 and found["penstock_batch_longest_pause_seconds"] < 60


def test_of_an_owners_batches_those_that_ended_first_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def kept(url: str) -> tuple[list[str], int]:
        client, now = redis.asyncio.Redis.from_url(url), int(time.time())
        store = BatchStore(client)
        for number in range(6):
            await store.create(
                BatchRecord(f"batch_{number}", EVERYBODY, "/v1/completions", "file-x", "24h", now, now + 60)
            )
            if number not in (0, 5):
                await store.move(f"batch_{number}", ("validating",), "failed")
        found = [each.record.batch_id for each in await store.list_of("", None, 100)]
        num_keys = len([key async for key in client.scan_iter("batch:*")])
        await client.aclose()
        return found, num_keys

    monkeypatch.setattr(stores, "MAX_KEPT", 3)
    with running_redis(tmp_path / "redis", None) as url:
        found, num_keys = asyncio.run(kept(url))
    assert found == ["batch_5", "batch_4", "batch_3", "batch_0"] and num_keys == 4, "one that runs stays"
