"""Records of somebody else's in Redis never lead out of the files folder, remove nothing there, and stop nobody."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgpack
import pytest
import redis

from services.jobs.runtime import JobsRuntime
from services.jobs.upkeep import sweep
from services.jobs.worker import run_slice
from services.requests.store.batches.store import BatchRecord, BatchStore
from services.requests.store.client import connect
from services.requests.store.files.storage import Storage
from services.requests.store.files.store import FileRecord, FileStore
from services.requests.store.tenants.tenant import EVERYBODY
from shared.process.errors import Invalid
from shared.process.settings import JobsSettings
from shared.wire.stage import Stage
from shared.wire.streams import BATCHES_RUNNING, batch_key, batch_queued_key, file_key, files_key

ID = "file-0123456789abcdef01234567"


@pytest.fixture
def client(redis_url: str) -> "Iterator[redis.Redis]":
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def runtime(redis_url: str, tmp_path: Path) -> Iterator[JobsRuntime]:
    """A worker that takes no tasks, whose files are in a folder of `tmp_path`."""
    settings = JobsSettings(redis_url=redis_url, files_url=str(tmp_path / "data" / "files"))
    runtime = JobsRuntime(settings, Stage("jobs", settings), connect(settings))
    runtime.start()
    try:
        yield runtime
    finally:
        runtime.close()
        runtime.stage.transport.client.close()


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder outside of the files', with a file in it."""
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "precious.0").write_text("a secret")
    (tmp_path / "data" / "files" / "batches").mkdir(parents=True)
    (tmp_path / "data" / "files" / "contents" / "x").mkdir(parents=True)
    return tmp_path / "victim"


def batch(batch_id: str, input_file_id: str = ID) -> BatchRecord:
    return BatchRecord(
        batch_id, EVERYBODY, "/v1/completions", input_file_id, "24h", int(time.time()), int(time.time()) + 60
    )


@pytest.mark.parametrize(
    "batch_id", ["../../../victim", "../victim", "", ".", "batch_a/../../../../victim", "batch_*", "batch_\0"]
)
def test_a_task_for_no_batch_removes_nothing(
    runtime: JobsRuntime, client: "redis.Redis", victim: Path, batch_id: str
) -> None:
    for ended in ({}, {"record": msgpack.packb(asdict(batch(batch_id))), "status": "completed"}):
        client.set(batch_queued_key(batch_id), "1")
        if ended:
            client.hset(batch_key(batch_id), mapping=ended)
        runtime.call(run_slice(runtime, batch_id))
        assert (victim / "precious.0").exists() and (victim.parent / "data" / "files" / "batches").exists()


def test_a_task_for_a_batch_that_redis_does_not_know_leaves_its_folder(
    runtime: JobsRuntime, client: "redis.Redis"
) -> None:
    runtime.storage.write("batches/batch_restored/input", b"{}")
    client.set(batch_queued_key("batch_restored"), "1")
    runtime.call(run_slice(runtime, "batch_restored"))
    assert runtime.storage.read("batches/batch_restored/input") == b"{}"


@pytest.mark.parametrize(
    "changes",
    [
        {"file_id": "x/../../../../victim/precious", "expires_at": 0},
        {"file_id": "file-another"},
        {"expires_at": "0/../../../victim"},
        {"owner": None},
        {"num_bytes": "many"},
        {"surplus": 1},
    ],
    ids=str,
)
def test_a_forged_file_is_no_file(redis_url: str, client: "redis.Redis", victim: Path, changes: dict[str, Any]) -> None:
    whole = FileRecord("file-whole", "", "a.jsonl", "batch", 8, 0, 2_000_000_000)
    forged = asdict(FileRecord(ID, "", "a.jsonl", "batch", 8, 0, 0)) | changes
    client.set(file_key(ID), msgpack.packb(forged))
    client.set(file_key("file-whole"), msgpack.packb(asdict(whole)))
    client.zadd(files_key(""), {ID: 1, "file-whole": 2})
    client.zadd(files_key(""), {b"file-\xff": 3})

    async def asking() -> None:
        async with connect(JobsSettings(redis_url=redis_url)) as own:
            store = FileStore(own, Storage(str(victim.parent / "data" / "files")))
            with pytest.raises(Invalid) as refused:
                await store.load(ID, "")
            assert refused.value.status == 404
            assert await store.list_of("") == [whole], "the others are there as before"

    asyncio.run(asking())
    assert client.exists(file_key(ID)), "an operator can look at it"


def test_no_path_and_no_link_leads_out_of_the_files_folder(victim: Path) -> None:
    storage = Storage(str(victim.parent / "data" / "files"))
    (victim.parent / "data" / "files" / "contents" / "link").symlink_to(victim)
    (victim.parent / "data" / "files" / "contents" / "file").symlink_to(victim / "precious.0")
    for path in (
        "contents/x/../../../../victim/precious.0",
        "contents/link/precious.0",
        "contents/file",
        str(victim / "precious.0"),
        "../../victim",
    ):
        for use in (storage.open, storage.read, storage.size, lambda path: storage.write(path, b"")):
            with pytest.raises(FileNotFoundError):
                use(path)
        storage.remove(path)
        assert storage.names(path) == []
    assert [each.name for each in victim.iterdir()] == ["precious.0"] and (
        victim / "precious.0"
    ).read_text() == "a secret"


def test_a_forged_batch_keeps_the_sweep_and_the_list_from_nobody(
    runtime: JobsRuntime, redis_url: str, client: "redis.Redis"
) -> None:
    client.hset(batch_key("batch_garbage"), mapping={"record": b"\xc1", "status": b"\xff"})
    client.hset(batch_key("batch_half"), mapping={"status": "validating"})
    client.hset(
        batch_key("batch_other"), mapping={"record": msgpack.packb(asdict(batch("batch_good"))), "status": "validating"}
    )
    client.hset(
        batch_key("batch_path"),
        mapping={"record": msgpack.packb(asdict(batch("batch_path", "../../victim"))), "status": "validating"},
    )
    client.sadd(BATCHES_RUNNING, b"\xff", "../../victim", "batch_garbage", "batch_half", "batch_other", "batch_path")
    client.zadd("batches:", {b"\xff": 1})
    client.zadd("batches:", {"batch_garbage": 2, "batch_half": 3, "batch_other": 4, "batch_path": 5})

    async def create(runtime: JobsRuntime) -> list[str]:
        await BatchStore(runtime.client).create(batch("batch_good"))
        await sweep(runtime)
        return [each.record.batch_id for each in await BatchStore(runtime.client).list_of("", None, 100)]

    assert runtime.call(create(runtime)) == ["batch_good"]
    assert client.smembers(BATCHES_RUNNING) == {b"batch_good", b"\xff"}
    assert client.exists(batch_queued_key("batch_good"))
