"""Celery's queue, with what is no task of ours in it: it becomes dead letters, and the workers go on."""

import asyncio
import base64
import json
import time
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgpack
import pytest
import redis

from services.jobs.run import MAX_BEGUN, BatchRun
from services.jobs.runtime import JobsRuntime
from services.jobs.worker import run_slice
from services.requests.store.batches.store import BatchRecord, BatchStore
from services.requests.store.client import connect
from services.requests.store.files.store import FileRecord
from services.requests.store.tenants.tenant import EVERYBODY
from shared.process.settings import JobsSettings
from shared.wire.job_queue import make_queue, send_batch
from shared.wire.stage import Stage
from shared.wire.streams import BATCHES_RUNNING, JOB_QUEUE, batch_key, batch_lease_key, batch_queued_key, file_key
from tests.deployment import Deployment
from tests.waiting import wait_until

Json = dict[str, Any]
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "nobody's", "prompt": "x"}}


@pytest.fixture
def client(redis_url: str) -> "Iterator[redis.Redis]":
    with redis.Redis.from_url(redis_url) as client:
        yield client


def create(redis_url: str, batch_id: str, folder: Path | None = None) -> None:
    """A batch; with the folder of the files it has an input, of one line for a model that nobody serves."""
    file = FileRecord(f"file-{batch_id}", "", "in.jsonl", "batch", 1, int(time.time()), int(time.time()) + 3600)
    record = BatchRecord(
        batch_id, EVERYBODY, "/v1/completions", file.file_id, "24h", int(time.time()), int(time.time()) + 3600
    )

    async def creating() -> None:
        async with connect(JobsSettings(redis_url=redis_url)) as own:
            await BatchStore(own).create(record)
            await own.set(file_key(file.file_id), msgpack.packb(asdict(file)))

    asyncio.run(creating())
    if folder is not None:
        (folder / "contents").mkdir(parents=True, exist_ok=True)
        (folder / file.path).write_text(json.dumps(LINE))


def changed(message: Json, **values: Any) -> Json:
    """The message with other headers, properties or fields, by their names with the dash as an
    underscore; None: without it.
    """
    found: Json = json.loads(json.dumps(message))
    for name, value in values.items():
        where = (
            found["headers"]
            if name in found["headers"] or name == "compression"
            else found["properties"]
            if name in found["properties"]
            else found
        )
        where[name.replace("_", "-") if where is found else name] = value
    return found


def body(value: Any) -> str:
    return base64.b64encode(json.dumps(value).encode()).decode()


def bad_messages(good: Json) -> list[bytes]:
    nothing: Json = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
    bomb = base64.b64encode(zlib.compress(b"x" * (4 << 20))).decode()
    changes: list[Json] = [
        {"content_type": "application/data"},
        {"content_type": "application/x-python-serialize"},
        {"content_encoding": "no such"},
        {"compression": "application/x-gzip", "body": bomb},
        {"compression": "zlib"},
        {"task": "os.system"},
        {"task": None},
        {"body": "no base64"},
        {"body": None},
        {"body": body("x" * 5000)},
        {"body": base64.b64encode(b"[" * 3000).decode()},
        {"body": body([["../../victim"], {}, nothing])},
        {"body": body([[7], {}, nothing])},
        {"body": body([["batch_a", "batch_b"], {}, nothing])},
        {"body": body([["batch_a"], {"more": 1}, nothing])},
        {"body": body({"args": ["batch_a"]})},
        {"body_encoding": "rot13"},
    ]
    whole = [json.dumps(changed(good, **each)).encode() for each in changes]
    return [
        *whole,
        b"",
        b"\xff\x00",
        b"null",
        b"[]",
        b"{}",
        b'{"headers": {}, "properties": 1}',
        b"[" * 2000,
        b'{"__type__": "datetime", "__value__": "?"}',
    ]


def test_no_message_in_the_queue_stops_a_worker(deployment: Deployment, client: "redis.Redis") -> None:
    create(deployment.redis_url, "batch_good")
    queue = make_queue(deployment.redis_url)
    assert send_batch(queue, client, "batch_good")
    good = client.rpop(JOB_QUEUE)
    bad = bad_messages(json.loads(good))
    client.rpush("celery:jobs", *reversed([*bad, good]))
    client.hset("celery:unacked", mapping={"tag-a": b"no JSON", "tag-b": b"[1]", "tag-c": json.dumps([[], "", "jobs"])})
    client.zadd("celery:unacked_index", {"tag-a": 1, "tag-b": 1, "tag-c": 1})
    worker = deployment.start("jobs")
    wait_until(
        lambda: client.hget(batch_key("batch_good"), "status") == b"failed", description="the good one's turn"
    )  # its input is gone
    wait_until(lambda: client.xlen("dead-letter") >= len(bad), description="all others are dead letters")
    letters = [values for _, values in client.xrange("dead-letter") if values[b"stream"] == JOB_QUEUE.encode()]
    assert len(letters) >= len(bad) and all(len(values[b"m"]) <= 16 << 10 for values in letters)
    wait_until(
        lambda: not client.exists("celery:unacked"), description="what nobody can restore is gone", timeout_s=120
    )
    assert deployment.processes[worker].poll() is None, "it has not died"
    create(deployment.redis_url, "batch_next")
    assert send_batch(queue, client, "batch_next")
    wait_until(lambda: client.hget(batch_key("batch_next"), "status") == b"failed", description="the worker goes on")
    assert "Traceback" not in (deployment.folder / f"{worker}.log").read_text()
    queue.close()


def test_a_batch_at_which_workers_die_ends_as_failed(deployment: Deployment, client: "redis.Redis") -> None:
    create(deployment.redis_url, "batch_a", deployment.folder / "files")

    def num_begun() -> int:
        return int(client.hget(batch_key("batch_a"), "num_begun") or 0)

    for number in (1, 2):  # no stage is there, so that it waits for ever
        worker = deployment.start("jobs")
        wait_until(
            lambda: client.hget(batch_key("batch_a"), "status") == b"in_progress", description="its input is checked"
        )
        wait_until(lambda number=number: num_begun() == number, description=f"it was begun {number} times")
        deployment.kill(worker)
        client.delete(batch_lease_key("batch_a"), batch_queued_key("batch_a"))
    worker = deployment.start("jobs")
    wait_until(lambda: num_begun() == 3, description="it was begun a third time")
    assert deployment.terminate(worker) == 0
    assert num_begun() == 0, "a worker that leaves in good order is no death"
    client.hset(batch_key("batch_a"), "num_begun", MAX_BEGUN)
    client.delete(batch_queued_key("batch_a"))
    deployment.start("jobs")
    wait_until(lambda: client.hget(batch_key("batch_a"), "status") == b"failed", description="nobody tries for ever")
    [error] = json.loads(client.hget(batch_key("batch_a"), "errors"))
    assert error["code"] == "worker_died" and not client.sismember(BATCHES_RUNNING, "batch_a")


def test_a_mistake_of_ours_is_not_repeated_for_ever(
    redis_url: str, client: "redis.Redis", tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(redis_url, "batch_a", tmp_path / "files")
    settings = JobsSettings(redis_url=redis_url, files_url=str(tmp_path / "files"))
    runtime = JobsRuntime(settings, Stage("jobs", settings), connect(settings))
    runtime.start()
    errors: list[Exception] = [OSError("the disk is full"), *(ZeroDivisionError("ours") for _ in range(MAX_BEGUN))]

    async def fail(*_: Any) -> None:
        raise errors.pop(0)

    monkeypatch.setattr(BatchRun, "_answer_all", fail)
    while errors:
        client.set(batch_queued_key("batch_a"), "1")
        with pytest.raises((OSError, ZeroDivisionError)):
            runtime.call(run_slice(runtime, "batch_a"))
    client.set(batch_queued_key("batch_a"), "1")
    runtime.call(run_slice(runtime, "batch_a"))
    assert client.hget(batch_key("batch_a"), "status") == b"failed"
    runtime.close()
    runtime.stage.transport.client.close()


def test_health_tells_of_workers_that_die_and_of_batches_that_nobody_has(
    deployment: Deployment, client: "redis.Redis"
) -> None:
    gateway = deployment.start("gateway")
    deployment.wait_live(gateway)
    create(deployment.redis_url, "batch_a", deployment.folder / "files")

    def warnings() -> str:
        answer = deployment.get("/health", gateway)
        return " ".join(answer.json()["warnings"]) if answer.status_code in (200, 503) else ""

    wait_until(lambda: "batches wait (1), and no worker of batches is alive" in warnings(), description="a batch waits")
    for number in range(4):
        worker = deployment.start("jobs", f"jobs-{number}")
        deployment.wait_live(worker)
        if number < 3:
            deployment.kill(worker)
            wait_until(lambda: not deployment.registry().of("jobs"), description="its lease has run out")
    wait_until(
        lambda: "workers of batches die again and again: 3 within ten minutes" in warnings(),
        description="three have died",
    )
    deployment.terminate(worker)
    deployment.start("jobs", "jobs-9")
    wait_until(lambda: "die again and again: 3" in warnings(), description="the one that has left is none of them")
