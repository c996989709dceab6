"""Files: their records are in Redis, their bytes in the storage. Each has an owner; to other tenants it
does not exist."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from typing import IO, Any

import msgpack
import redis.asyncio

from services.requests.bodies.fields import shortened
from services.requests.store.client import redis_errors_as_503
from services.requests.store.files.storage import PIECE_BYTES, Storage
from services.requests.store.record import read_record
from shared.process.errors import Invalid, Recoverable
from shared.wire.ids import is_file_id
from shared.wire.script import load_script
from shared.wire.streams import FILE_TTL_S, file_key, files_key, uploads_key

MAX_FILES = 10_000  # of one owner
CONTENTS = "contents"  # the storage's folder for the bytes of files
STORE_TIMEOUT_S = 600.0  # to store a file that was received
RESERVED_S = STORE_TIMEOUT_S + 60  # a gateway that is killed keeps the room of its uploads for so long

RESERVE_UPLOAD = load_script("reserve_upload")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file's record."""

    file_id: str
    owner: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    expires_at: int

    @property
    def path(self) -> str:
        return content_path(self.file_id, self.expires_at)

    def describe(self) -> dict[str, Any]:
        """The object of the API."""
        return {
            "id": self.file_id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


class FileStore:
    def __init__(self, client: "redis.asyncio.Redis", storage: Storage) -> None:
        self.client = client
        self.storage = storage

    async def load(self, file_id: str, owner: str) -> FileRecord:
        """Raises Invalid (404) for a file that does not exist, or is not this owner's."""
        with redis_errors_as_503():
            packed: Any = await self.client.get(file_key(file_id))
        record = read_file(file_id, packed)
        if record is None or record.owner != owner:
            raise Invalid(f"No such File object: {shortened(file_id)}", param="id", code="file_not_found", status=404)
        return record

    async def list_of(self, owner: str) -> list[FileRecord]:
        """All files of an owner, the newest first."""
        with redis_errors_as_503():
            found: Any = await self.client.zrevrange(files_key(owner), 0, -1)
            names = [name.decode(errors="replace") for name in found]
            values: list[Any] = await self.client.mget([file_key(name) for name in names]) if names else []
            if gone := [name for name, value in zip(names, values, strict=True) if value is None]:
                await self.client.zrem(files_key(owner), *gone)
        return [
            record for name, value in zip(names, values, strict=True) if (record := read_file(name, value)) is not None
        ]

    async def check_room(
        self, owner: str, num_bytes: int, *, max_size: int, coming: dict[str, int] | None = None
    ) -> None:
        """Check that there is room for one more file. max_size: of all of the owner's, in bytes.
        coming: sizes by id of those that are being stored.

        Raises Invalid (413) beyond the owner's bounds.
        """
        sizes = {each.file_id: each.num_bytes for each in await self.list_of(owner)} | (coming or {})
        if len(sizes) >= MAX_FILES:
            raise Invalid(f"there are {MAX_FILES} files already: delete some", code="too_many_files", status=413)
        if (size := sum(sizes.values())) + num_bytes > max_size:
            raise Invalid(
                f"this file has {num_bytes} bytes, and of {max_size} for all files {size} are taken: delete some",
                code="storage_full",
                status=413,
            )

    async def add(
        self, file: IO[bytes], owner: str, filename: str, purpose: str, ttl_s: int, *, max_size: int
    ) -> FileRecord:
        """Keep a file that has been received. Raises what `check_room` raises; TimeoutError if the
        storage is too slow."""
        num_bytes = await asyncio.to_thread(file.seek, 0, 2)
        now = int(time.time())
        record = FileRecord(f"file-{uuid.uuid4().hex[:24]}", owner, filename, purpose, num_bytes, now, now + ttl_s)
        async with self._room_for(record, max_size):
            await asyncio.to_thread(self._copy, file, record.path)
            await self.enter(record)
        return record

    @asynccontextmanager
    async def _room_for(self, record: FileRecord, max_size: int) -> AsyncIterator[None]:
        """Reserve room until the file is known. It is reserved before the room is checked: of two uploads
        at once, the second sees the first."""
        key, own = uploads_key(record.owner), f"{record.file_id}/{record.num_bytes}"
        with redis_errors_as_503():
            before = await RESERVE_UPLOAD.run(self.client, [key], own, int(RESERVED_S * 1000))
        try:
            coming = {name: int(size) for name, size in (each.decode().split("/") for each in before)}
            await self.check_room(record.owner, record.num_bytes, max_size=max_size, coming=coming)
            yield
        finally:
            with suppress(Recoverable), redis_errors_as_503():  # without Redis the reservation expires
                await self.client.zrem(key, own)

    async def enter(self, record: FileRecord) -> None:
        """Make a file known, after its bytes are stored. Safe to repeat."""
        with redis_errors_as_503():
            async with self.client.pipeline(transaction=True) as pipe:
                pipe.set(file_key(record.file_id), msgpack.packb(asdict(record)), exat=record.expires_at)
                pipe.zadd(files_key(record.owner), {record.file_id: record.created_at})
                pipe.expire(files_key(record.owner), FILE_TTL_S)
                await pipe.execute()

    async def delete(self, record: FileRecord) -> None:
        with redis_errors_as_503():
            async with self.client.pipeline(transaction=True) as pipe:
                pipe.delete(file_key(record.file_id))
                pipe.zrem(files_key(record.owner), record.file_id)
                await pipe.execute()
        await asyncio.to_thread(self.storage.remove, record.path)

    def _copy(self, file: IO[bytes], path: str) -> None:
        until = time.monotonic() + STORE_TIMEOUT_S
        file.seek(0)
        with self.storage.writing(path) as kept:
            while piece := file.read(PIECE_BYTES):
                if time.monotonic() > until:
                    raise TimeoutError(f"the storage has not taken it within {STORE_TIMEOUT_S:g} s")
                kept.write(piece)


def read_file(file_id: str, packed: bytes | None) -> FileRecord | None:
    """A file's record; None if it is none, or if its id is not that of its key, for the id becomes a
    path."""
    record = read_record(FileRecord, file_key(file_id), packed)
    return record if record is not None and is_file_id(file_id) and record.file_id == file_id else None


def content_path(file_id: str, expires_at: int) -> str:
    """The path of a file's bytes. It contains the time of expiry, so that upkeep finds expired files
    without their records."""
    return f"{CONTENTS}/{file_id}.{expires_at}"
