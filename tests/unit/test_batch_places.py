"""A batch whose tenant has no more to spend waits without the places that other batches could use."""

import asyncio
import time
from pathlib import Path

import redis

from services.jobs.asking import Asked
from services.jobs.run import BatchRun
from services.jobs.runtime import JobsRuntime
from services.requests.store.batches.store import Batch, BatchRecord
from services.requests.store.client import connect
from services.requests.store.record import make_record
from services.requests.store.tenants.tenant import Tenant
from shared.model.sampling_params import SamplingParams
from shared.process.settings import JobsSettings
from shared.wire.messages import GenerateRequest
from shared.wire.stage import Stage
from shared.wire.streams import inflight_key, requests, running_key

TENANT = Tenant("0123456789abcdef", "slow", max_concurrency=8)


def test_a_line_that_waits_for_its_tenants_limit_holds_no_places(redis_url: str, tmp_path: Path) -> None:
    settings = JobsSettings(redis_url=redis_url, files_url=str(tmp_path / "files"), batch_requests=8)
    runtime = JobsRuntime(settings, Stage("jobs", settings), connect(settings))
    record = make_record("text_completion", "m", "m", n=8, key="a", is_background=True)
    asked = Asked(
        record,
        [GenerateRequest(each, None, "m", SamplingParams(max_tokens=1), prompt="x") for each in record.request_ids],
        b"",
        lambda *_: None,  # type: ignore[arg-type]
    )
    now = int(time.time())
    batch = Batch(BatchRecord("batch_a", TENANT, "/v1/completions", "file-x", "24h", now, now + 60), "in_progress", {})

    async def waiting() -> tuple[int, int]:
        entering = asyncio.create_task(BatchRun(runtime, "batch_a")._enter(batch, asked))
        async with asyncio.timeout(30):  # others have their turn at once, for all places
            await asyncio.sleep(0.2)
            await runtime.slots.acquire(8)
        runtime.slots.release(8)
        num_admitted = await runtime.client.xlen(requests("m").key)
        await runtime.client.hdel(inflight_key("m"), "interactive.0")
        await asyncio.wait_for(entering, 60)
        return num_admitted, runtime.slots.num_taken

    with redis.Redis.from_url(redis_url) as client:
        client.hset(inflight_key("m"), mapping={"": 1, "interactive.0": 1})
        client.hset(running_key(TENANT.tenant_id), "interactive.0", inflight_key("m"))
        runtime.start()
        try:
            assert runtime.call(waiting()) == (0, 8)
        finally:
            runtime.close()
            runtime.stage.transport.client.close()
        assert client.xlen(requests("m").key) == 8
