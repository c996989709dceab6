"""The gateway's reader and a batch's run, against a real Redis and in virtual time: no test sleeps, and each
wait lasts exactly as long as it should.
"""

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import redis

from services.gateway.generation.log_reader import LogReader
from services.gateway.generation.subscriptions import Subscriptions
from services.jobs.run import BatchRun
from services.jobs.runtime import JobsRuntime
from services.requests.store.batches.store import BatchRecord
from services.requests.store.files.store import FileRecord
from services.requests.store.tenants.tenant import EVERYBODY
from shared.process.settings import JobsSettings
from shared.process.stage_settings import StageSettings
from shared.wire.messages import GenerateRequest, StepEvents, TokenEvent, decode, encode
from shared.wire.registry import Registry
from shared.wire.replica import Replica
from shared.wire.stage import Stage
from shared.wire.streams import MESSAGE, events, inflight_key, requests, response_key
from shared.wire.token_log import write_step
from tests.virtual_time import BEGAN_AT, RedisAtOnce, VirtualLoop, run_virtual

PING_S = 15.0


def write(client: "redis.Redis", event: TokenEvent, gateway: str = "") -> None:
    pipe = client.pipeline(transaction=False)
    write_step(
        pipe, "m", [(event, encode(event))], [(events(gateway), StepEvents((encode(event),)))] if gateway else []
    )
    assert pipe.execute() == [[]]


def test_events_that_do_not_come_are_read_from_the_log_after_an_interval_of_silence(redis_url: str) -> None:
    loop, client = VirtualLoop(), redis.Redis.from_url(redis_url)
    stage = Stage("gateway", StageSettings(redis_url=redis_url, replica_id="gateway-1"))
    through: Any = RedisAtOnce(redis_url)
    subscriptions = Subscriptions(stage, through, loop.clock())
    client.set(response_key("r"), b"")

    async def play() -> None:
        for position, gateway in enumerate(("gateway-1", "", "gateway-1", ""), 1):
            await asyncio.sleep(1)
            write(client, TokenEvent("r.0", position, 7, "x", finish_reason="stop" if position == 4 else None), gateway)

    async def read() -> list[tuple[float, int]]:
        subscription = subscriptions.subscribe("r", {"r.0": 0}, 0, "m")
        subscription.is_submitted = True
        playing, came = asyncio.create_task(play()), []
        while subscription.unfinished:
            came += [(round(loop.time(), 1), each.position) for each in await subscription.next(PING_S)]
        await playing
        return came

    came = run_virtual(loop, read(), subscriptions.run(), LogReader(subscriptions, through, PING_S).run())
    # the third shows that the second is missing; when a look comes at 15 s the fourth has been silent for 12
    assert came == [(1.0, 1), (3.0, 2), (3.0, 3), (30.0, 4)]
    through.client.close()
    client.close()
    stage.transport.close()


def test_a_line_whose_log_has_no_end_is_asked_again_in_the_same_run(redis_url: str, tmp_path: Path) -> None:
    loop, client = VirtualLoop(), redis.Redis.from_url(redis_url)
    settings = JobsSettings(redis_url=redis_url, files_url=str(tmp_path), replica_id="jobs-1")
    stage, numbers = Stage("jobs", settings), itertools.count()
    live = tuple(Replica(name, name, "here", 1, 0.0, "m", 100) for name in ("tokenizer", "compute", "sampler"))
    stage._heartbeat.registry = Registry(live)
    through: Any = RedisAtOnce(redis_url)
    runtime = JobsRuntime(settings, stage, through, loop.clock(), lambda: f"id-{next(numbers)}")
    asked_at: list[float] = []

    async def play() -> None:
        """Answer each request after 2 s; of the first, the end never comes."""
        last_id = "0-0"
        while True:
            entries: Any = client.xrange(requests("m").key, min=f"({last_id}")
            for entry_id, values in entries:
                last_id = entry_id.decode()
                request = decode(GenerateRequest, values[MESSAGE])
                asked_at.append(round(loop.time(), 1))
                await asyncio.sleep(2)
                is_whole = len(asked_at) > 1
                write(
                    client, TokenEvent(request.request_id, 1, 7, "x", 3, finish_reason="length" if is_whole else None)
                )
                client.hdel(inflight_key("m"), request.request_id)
            await asyncio.sleep(0.1)

    async def run() -> float:
        now = int(BEGAN_AT)
        file = FileRecord("file-x", EVERYBODY.tenant_id, "x.jsonl", "batch", 0, now, 1 << 32)
        body = {"model": "m", "prompt": "x", "max_tokens": 1}
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
        runtime.storage.write(file.path, json.dumps(line).encode())
        await runtime.files.enter(file)
        await runtime.batches.create(
            BatchRecord("batch_a", EVERYBODY, "/v1/completions", "file-x", "24h", now, now + 86400)
        )
        assert not await BatchRun(runtime, "batch_a").run()
        return loop.time()

    ended_at = run_virtual(loop, run(), play(), runtime.slots.look())
    batch = asyncio.run(runtime.batches.load("batch_a", EVERYBODY))
    assert batch.status == "completed" and batch.totals.completed == 1
    assert (asked_at, round(ended_at, 1)) == ([0.1, 34.1], 36.1)
    through.client.close()
    client.close()
    stage.transport.close()
    runtime._loop.close()
