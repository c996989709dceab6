"""A worker looks now and then after batches that nobody has, Redis' memory, and what nobody needs any more."""

import asyncio
import io
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
import redis
from msgspec import structs

from services.jobs.runtime import JobsRuntime
from services.jobs.upkeep import check_memory, sweep, tidy
from services.jobs.worker import CONCURRENCY, add_tasks, run_slice
from services.requests.store.batches.figures import queue_note
from services.requests.store.batches.store import BatchRecord
from services.requests.store.client import connect
from services.requests.store.tenants.tenant import EVERYBODY
from shared.process.settings import JobsSettings
from shared.wire.messages import decode_record
from shared.wire.registry import Registry
from shared.wire.stage import Stage
from shared.wire.streams import LOG_TTL_S, RUNNING_LOG_TTL_S, batch_key, batch_lease_key, batch_queued_key, upkeep_key
from tests.deployment import Deployment
from tests.waiting import wait_until


@pytest.fixture
def client(redis_url: str) -> "Iterator[redis.Redis]":
    with redis.Redis.from_url(redis_url) as client:
        yield client


def do(redis_url: str, folder: Path, *parts: Callable[[JobsRuntime], Awaitable[object]]) -> None:
    """Each part of the upkeep, whoever has just done it, by a worker that runs nothing."""

    async def doing() -> None:
        for part in parts:
            for name in ("sweep", "memory", "tidy"):
                await runtime.client.delete(upkeep_key(name))
            await part(runtime)

    settings = JobsSettings(redis_url=redis_url, files_url=str(folder))
    runtime = JobsRuntime(settings, Stage("jobs", settings), connect(settings))
    runtime.start()
    try:
        runtime.call(doing())
    finally:
        runtime.close()
        runtime.stage.transport.client.close()


def record(batch_id: str) -> BatchRecord:
    return BatchRecord(batch_id, EVERYBODY, "/v1/completions", "file-x", "24h", int(time.time()), int(time.time()) + 60)


def test_a_batch_that_no_live_worker_has_gets_one_task(redis_url: str, client: "redis.Redis", tmp_path: Path) -> None:
    async def create(runtime: JobsRuntime) -> None:
        for name in ("batch_lost", "batch_of_a_dead_worker", "batch_ended"):
            await runtime.batches.create(record(name))
        await runtime.batches.move("batch_ended", ("validating",), "failed")

    client.set(batch_lease_key("batch_of_a_dead_worker"), "jobs-dead/x", px=60_000)
    do(redis_url, tmp_path, create, sweep, sweep)
    assert client.llen("celery:jobs") == 2, "one for each of two, once"
    assert client.exists(batch_queued_key("batch_lost"), batch_queued_key("batch_of_a_dead_worker")) == 2
    assert not client.exists(batch_lease_key("batch_of_a_dead_worker"))
    assert client.smembers("batches-running") == {b"batch_lost", b"batch_of_a_dead_worker"}


def test_a_batch_that_waits_for_its_turn_is_not_sent_again_unless_tasks_are_lost(
    redis_url: str, client: "redis.Redis", tmp_path: Path
) -> None:
    async def create(runtime: JobsRuntime) -> None:
        for name in ("batch_a", "batch_b"):
            await runtime.batches.create(record(name))

    def wait_for(seconds: int) -> None:
        """Half as long as the mark of a task lives."""
        for name in ("batch_a", "batch_b"):
            client.expire(batch_queued_key(name), max(1, client.ttl(batch_queued_key(name)) - seconds))

    do(redis_url, tmp_path, create, sweep)
    wait_for(30)
    do(redis_url, tmp_path, sweep)
    assert (
        min(client.ttl(batch_queued_key(name)) for name in ("batch_a", "batch_b")) > 30
        and client.llen("celery:jobs") == 2
    )
    client.rpop("celery:jobs")  # and whoever took it is dead
    wait_for(30)
    do(redis_url, tmp_path, sweep)
    assert max(client.ttl(batch_queued_key(name)) for name in ("batch_a", "batch_b")) <= 30, "they are sent again soon"
    client.delete("celery:jobs")  # with nothing in the queue, all are lost
    do(redis_url, tmp_path, sweep)
    assert client.llen("celery:jobs") == 2
    client.delete("celery:jobs")
    do(redis_url, tmp_path, sweep)
    assert client.llen("celery:jobs") == 0, "but for those that a worker may just have taken"


def test_a_clock_that_goes_back_does_not_stop_the_upkeep(
    redis_url: str, client: "redis.Redis", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def sweep_after_a_jump(runtime: JobsRuntime) -> None:
        await runtime.batches.create(record("batch_a"))
        await runtime.client.set(
            upkeep_key("sweep"), "jobs-other", ex=3600
        )  # what is left of four seconds when Redis' clock has gone back
        await runtime.client.set(batch_lease_key("batch_a"), "jobs-dead/x", ex=3600)
        runtime.stage._heartbeat.registry = Registry(
            (structs.replace(runtime.stage.describe(), replica_id="jobs-dead"),)
        )  # its name has an hour, too
        await sweep(runtime)
        add_tasks(runtime.queue, runtime)
        for each in runtime.queue.conf.beat_schedule.values():
            assert abs(each["schedule"].now().timestamp() - time.monotonic()) < 3600, "the worker's does not matter"

    do(redis_url, tmp_path, sweep_after_a_jump)
    assert client.llen("celery:jobs") == 1


def test_of_two_tasks_for_a_batch_one_is_done(redis_url: str, client: "redis.Redis", tmp_path: Path) -> None:
    async def create(runtime: JobsRuntime) -> None:
        await runtime.batches.create(record("batch_a"))

    async def run(runtime: JobsRuntime) -> None:
        await run_slice(runtime, "batch_a")

    do(redis_url, tmp_path, create, run)
    assert client.hget(batch_key("batch_a"), "status") == b"validating", "no mark: it is one too many"
    do(redis_url, tmp_path, sweep, run)
    assert client.hget(batch_key("batch_a"), "status") == b"failed", "it was looked at, and its file is nowhere"


@pytest.mark.parametrize("taker", ["", "jobs-other/x"])
def test_a_batch_whose_lease_ran_out_goes_on_unless_another_worker_has_it(
    taker: str, redis_url: str, client: "redis.Redis", tmp_path: Path
) -> None:
    # there are no stages: it waits
    line = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "x"}}'

    async def run(office: JobsRuntime) -> None:
        file = await office.files.add(io.BytesIO(line), "", "lines.jsonl", "batch", 3600, max_size=1 << 20)
        await office.batches.create(replace(record("batch_a"), input_file_id=file.file_id))
        await office.send("batch_a")
        running = asyncio.create_task(run_slice(office, "batch_a"))
        while await office.client.hget(batch_key("batch_a"), "status") != b"in_progress":
            assert not running.done()
            await asyncio.sleep(0.05)
        await office.client.delete("celery:jobs")
        if taker:
            await office.client.set(batch_lease_key("batch_a"), taker)
        else:
            await office.client.delete(batch_lease_key("batch_a"))
        await running

    do(redis_url, tmp_path, run)
    assert client.llen("celery:jobs") == (0 if taker else 1)
    assert client.get(batch_lease_key("batch_a")) == (taker.encode() or None)


def test_neither_the_upkeep_nor_the_end_of_a_batch_waits_behind_batches_that_wait_for_their_turn(
    deployment: Deployment, client: "redis.Redis", tmp_path: Path
) -> None:
    # there are no stages: it waits
    line = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "x"}}'

    async def create(runtime: JobsRuntime) -> None:
        file = await runtime.files.add(io.BytesIO(line), "", "lines.jsonl", "batch", 3600, max_size=1 << 20)
        for number in range(CONCURRENCY + 2):
            await runtime.batches.create(replace(record(f"batch_{number}"), input_file_id=file.file_id))

    def status_of(batch_id: str) -> Any:
        return client.hget(batch_key(batch_id), "status")

    do(deployment.redis_url, tmp_path / "files", create, sweep)
    worker = deployment.start("jobs", files_url=str(tmp_path / "files"))
    wait_until(
        lambda: len(client.keys(batch_lease_key("*"))) == CONCURRENCY, description="no more batches can be under way"
    )
    for _ in range(2):
        client.delete(upkeep_key("sweep"))
        wait_until(lambda: client.exists(upkeep_key("sweep")), description="the next sweep")
    assert client.llen("celery:jobs") == 2, "nothing but the batches that wait"
    cancelled, late = (
        name for name in map("batch_{}".format, range(CONCURRENCY + 2)) if not client.exists(batch_lease_key(name))
    )
    client.hset(batch_key(cancelled), "status", "cancelling")
    asked = decode_record(BatchRecord, client.hget(batch_key(late), "record"))
    client.hset(batch_key(late), "record", msgpack.packb(asdict(replace(asked, expires_at=1))))
    wait_until(
        lambda: (status_of(cancelled), status_of(late)) == (b"cancelled", b"expired"), description="both have ended"
    )
    wait_until(
        lambda: not client.exists(batch_lease_key(cancelled), batch_lease_key(late)),
        description="and are given up, which comes after",
    )
    assert len(client.keys(batch_lease_key("*"))) == CONCURRENCY and client.llen("celery:jobs") == 2, (
        "the others are where they were"
    )
    totals = [client.hmget(batch_key(each), "total", "not_executed") for each in (cancelled, late)]
    assert totals == [[b"1", b"1"]] * 2, "each of their lines has an answer that says so"
    server = int(client.info("server")["process_id"])
    os.kill(server, signal.SIGSTOP)
    try:
        assert deployment.terminate(worker, timeout_s=120) == 0, "it stops though Redis does not reply"
    finally:
        os.kill(server, signal.SIGCONT)


def test_what_waits_is_told_with_and_without_workers(redis_url: str, client: "redis.Redis", tmp_path: Path) -> None:
    def figures() -> dict[bytes, bytes]:
        return dict(client.hgetall("batch-figures"))

    async def create(runtime: JobsRuntime) -> None:
        await runtime.batches.create(replace(record("batch_old"), created_at=1000))
        await runtime.batches.create(replace(record("batch_new"), created_at=2000))

    async def begin(runtime: JobsRuntime) -> None:
        await runtime.batches.move("batch_old", ("validating",), "in_progress", total=10)
        async with runtime.client.pipeline(transaction=False) as pipe:
            for counts in (
                {"completed": 3, "failed": 1},
                {"completed": 2, "failed": 0},
                {"completed": 3, "failed": 2},
            ):  # the second: by who begins again
                queue_note(pipe, "batch_old", counts)
            queue_note(pipe, "batch_of_nobody", {"completed": 3})
            await pipe.execute()

    async def end(runtime: JobsRuntime) -> None:
        await runtime.batches.move("batch_old", ("in_progress",), "cancelled")
        await runtime.batches.move("batch_new", ("validating",), "expired")

    do(redis_url, tmp_path, create)
    assert figures() == {b"oldest_at": b"1000", b"progressed_at": b"1000"}, "nobody has swept yet"
    do(redis_url, tmp_path, begin, sweep)
    assert figures() == {
        b"oldest_at": b"1000",
        b"progressed_at": b"2000",
        b"lines_waiting": b"5",
        b"completed": b"3",
        b"failed": b"2",
    }
    do(redis_url, tmp_path, end, sweep)
    assert figures() == {b"completed": b"3", b"failed": b"2", b"ended:cancelled": b"1", b"ended:expired": b"1"}
    assert client.ttl("batch-figures") > 0 and not client.exists("batch:batch_of_nobody")


def test_near_its_limit_redis_keeps_logs_of_ended_requests_for_a_minute(
    redis_url: str, client: "redis.Redis", tmp_path: Path
) -> None:
    for name, ttl_s in (("log:ended", LOG_TTL_S), ("log:running", RUNNING_LOG_TTL_S)):
        client.xadd(name, {"m": "x"}, "1-0")
        client.expire(name, ttl_s)
    client.set("stored:ended", "x", ex=LOG_TTL_S)
    client.set("response:ended", "x", ex=RUNNING_LOG_TTL_S)
    for number in range(256):
        client.set(f"ballast:{number}", b"x" * (128 << 10))  # beside which connections and their buffers do not count

    def use(share: float) -> None:
        client.config_set("maxmemory", int(int(client.info("memory")["used_memory"]) / share))
        do(redis_url, tmp_path, check_memory)

    use(0.5)
    assert client.ttl("log:ended") > 3000 and not client.exists(upkeep_key("full"))
    use(0.72)
    assert client.ttl("log:ended") <= 60 < 80_000 < client.ttl("log:running") and not client.exists(upkeep_key("full"))
    assert client.ttl("stored:ended") <= 60 and client.ttl("response:ended") > 80_000, (
        "another sequence of that response runs"
    )
    use(0.78)
    assert client.exists(upkeep_key("full"))
    client.expire("log:ended", LOG_TTL_S)
    use(1.1)  # nothing can be written any more
    assert client.ttl("log:ended") <= 60


def test_what_nobody_needs_goes_and_the_rest_stays(redis_url: str, client: "redis.Redis", tmp_path: Path) -> None:
    now = int(time.time())
    contents, folders = tmp_path / "contents", tmp_path / "batches"
    contents.mkdir()
    for name in (f"file-old.{now - 1}", f"file-new.{now + 999}", "file-begun.1.abc.part", "file-abandoned.1.abc.part"):
        (contents / name).write_bytes(b"x")
    os.utime(contents / "file-abandoned.1.abc.part", (now - 90_000, now - 90_000))
    for name in ("batch_ended", "batch_running", "batch_unknown"):
        (folders / name / "parts").mkdir(parents=True)

    async def create(runtime: JobsRuntime) -> None:
        await runtime.batches.create(record("batch_ended"))
        await runtime.batches.create(record("batch_running"))
        await runtime.batches.move("batch_ended", ("validating",), "failed")

    for name in ("prompts:gone", "requests:waited-for"):
        client.xadd(name, {"m": "x"}, "1-0")
    client.xdel("prompts:gone", "1-0")
    client.xadd("prompts:young", {"m": "x"})
    client.xtrim("prompts:young", maxlen=0)
    do(redis_url, tmp_path, create, tidy)
    assert sorted(path.name for path in contents.iterdir()) == ["file-begun.1.abc.part", f"file-new.{now + 999}"]
    assert sorted(path.name for path in folders.iterdir()) == ["batch_running", "batch_unknown"]
    assert [client.exists(name) for name in ("prompts:gone", "requests:waited-for", "prompts:young")] == [0, 1, 1]
