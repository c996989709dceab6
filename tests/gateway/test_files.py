"""Bounds on an owner's files, also where several come at once."""

import asyncio
import io
from pathlib import Path

import redis

from services.requests.store.files.storage import Storage
from services.requests.store.files.store import RESERVED_S, FileRecord, FileStore
from shared.process.errors import Invalid
from shared.wire.streams import uploads_key

SIZE, ROOM = 1000, 3


def add_at_once(redis_url: str, folder: Path, count: int) -> list[FileRecord | BaseException]:
    """So many files of one owner, stored at the same time where three have room."""

    async def adding() -> list[FileRecord | BaseException]:
        async with redis.asyncio.Redis.from_url(redis_url) as client:
            store = FileStore(client, Storage(str(folder)))
            files = [
                store.add(io.BytesIO(b"x" * SIZE), "somebody", "lines.jsonl", "batch", 3600, max_size=ROOM * SIZE)
                for _ in range(count)
            ]
            return await asyncio.gather(*files, return_exceptions=True)

    return asyncio.run(adding())


def test_files_that_come_at_once_do_not_pass_the_bound_together(redis_url: str, tmp_path: Path) -> None:
    found = add_at_once(redis_url, tmp_path, 8)
    refused = [each for each in found if isinstance(each, Invalid)]
    assert len(refused) == 8 - ROOM == sum(each.code == "storage_full" for each in refused)
    assert len(list((tmp_path / "contents").iterdir())) == ROOM
    with redis.Redis.from_url(redis_url) as client:
        assert not client.exists(uploads_key("somebody")), "what was reserved is given back"


def test_what_a_killed_gateway_has_reserved_is_given_up(redis_url: str, tmp_path: Path) -> None:
    with redis.Redis.from_url(redis_url) as client:
        now = int(client.time()[0]) * 1000
        client.zadd(uploads_key("somebody"), {f"file-a/{SIZE}": now - 1, f"file-b/{SIZE}": now + 60_000})
        found = add_at_once(redis_url, tmp_path, 3)
        assert sorted(isinstance(each, FileRecord) for each in found) == [False, True, True], (
            "one of the two has its room still"
        )
        assert client.zrange(uploads_key("somebody"), 0, -1) == [f"file-b/{SIZE}".encode()]
        assert 0 < client.ttl(uploads_key("somebody")) <= RESERVED_S


def test_a_storage_that_fails_keeps_no_room(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "contents").write_text("no folder")
    [failed] = add_at_once(redis_url, tmp_path, 1)
    assert isinstance(failed, OSError)
    (tmp_path / "contents").unlink()
    assert all(isinstance(each, FileRecord) for each in add_at_once(redis_url, tmp_path, ROOM))


def test_what_was_asked_and_answered_is_for_nobody_else_on_the_machine(redis_url: str, tmp_path: Path) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.set("prompt", "a secret", ex=60)
    kept = tmp_path / "redis" / "appendonlydir"
    assert [path.name for path in (kept, *kept.iterdir()) if path.stat().st_mode & 0o077] == [] != list(kept.iterdir())
    Storage(str(tmp_path / "new" / "files")).write("contents/a", b"a secret")
    assert (tmp_path / "new" / "files").stat().st_mode & 0o077 == 0
    (tmp_path / "shared").mkdir(mode=0o755)
    Storage(str(tmp_path / "shared")).write("contents/a", b"for two users, as the operator likes it")
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o755
