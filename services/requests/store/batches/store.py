"""Batches: each is a hash in Redis with its request and its progress. Gateways make and cancel it, the
workers of services/jobs do the rest.

One script changes the status, from those that the caller allows: a batch that has ended stays as it
is, whatever a late worker wants.
"""

import time
from dataclasses import asdict, astuple, dataclass, field, fields
from typing import Any

import msgpack
import orjson
import redis.asyncio

from services.requests.bodies.fields import shortened
from services.requests.store.batches.figures import queue_created
from services.requests.store.client import redis_errors_as_503
from services.requests.store.tenants.tenant import Tenant
from shared.process.errors import Invalid, Rejected
from shared.process.telemetry import get_logger
from shared.wire.ids import is_batch_id, is_file_id
from shared.wire.messages import decode_record
from shared.wire.script import load_script, table
from shared.wire.streams import BATCH_FIGURES, BATCHES_RUNNING, FILE_TTL_S, LONGEST_WINDOW_S, batch_key, batches_key

log = get_logger("penstock.gateway")

RUNNING = ("validating", "in_progress", "finalizing", "cancelling")
MAX_RUNNING = 100  # of one owner
MAX_KEPT = 10_000  # of one owner: of more, those that ended first are forgotten
TTL_S = FILE_TTL_S + LONGEST_WINDOW_S  # as long as what it writes

CREATE_BATCH, MOVE_BATCH = load_script("create_batch"), load_script("move_batch")
BEGIN_BATCH = load_script("begin_batch")


@dataclass(frozen=True, slots=True)
class Totals:
    """Totals of a batch, or of a part of it."""

    completed: int = 0
    failed: int = 0  # with an error of their own, or a stage's
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    not_executed: int = 0  # their batch was cancelled, or has expired

    @property
    def num_lines(self) -> int:
        return self.completed + self.failed + self.not_executed

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A batch as its client asked for it."""

    batch_id: str
    tenant: Tenant  # the owner, with its rights and limits when the batch was made
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_ttl_s: int = FILE_TTL_S

    @property
    def owner(self) -> str:
        return self.tenant.tenant_id


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch as Redis has it."""

    record: BatchRecord
    status: str
    times: dict[str, int]  # by status, when it came to be that
    total: int = 0
    totals: Totals = field(default_factory=Totals)
    model: str = ""
    output_file_id: str = ""
    error_file_id: str = ""
    errors: list[dict[str, Any]] | None = None
    traceparent: str = ""  # of the request that made it; empty: it is not traced
    # runs in a row that died, or failed by a mistake of ours, before they had answered a further line
    num_begun: int = 0

    @property
    def is_running(self) -> bool:
        return self.status in RUNNING

    def closes(self, now: float) -> str:
        """Why no more of its lines are executed, as a code of their errors; empty if they are. now: wall
        clock, s."""
        if self.status == "cancelling":
            return "batch_cancelled"
        return "batch_expired" if now > self.record.expires_at and self.status in ("validating", "in_progress") else ""

    @property
    def progressed_at(self) -> int:
        """When it last moved, or a line of it was answered."""
        return max([self.record.created_at, *self.times.values()])

    def describe(self) -> dict[str, Any]:
        """The object of the API."""
        record, totals = self.record, self.totals
        statuses = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            "id": record.batch_id,
            "object": "batch",
            "endpoint": record.endpoint,
            "model": self.model or None,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": record.input_file_id,
            "completion_window": record.completion_window,
            "status": self.status,
            "output_file_id": self.output_file_id or None,
            "error_file_id": self.error_file_id or None,
            "created_at": record.created_at,
            "expires_at": record.expires_at,
            **{f"{status}_at": self.times.get(status) for status in statuses},
            "request_counts": {
                "total": self.total,
                "completed": totals.completed,
                "failed": totals.failed + totals.not_executed,
            },
            "usage": {
                "input_tokens": totals.input_tokens,
                "input_tokens_details": {"cached_tokens": totals.cached_tokens},
                "output_tokens": totals.output_tokens,
                "output_tokens_details": {"reasoning_tokens": totals.reasoning_tokens},
                "total_tokens": totals.input_tokens + totals.output_tokens,
            },
            "metadata": record.metadata,
        }


class BatchStore:
    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self.client = client

    async def create(self, record: BatchRecord, traceparent: str = "", model: str = "") -> Batch:
        """Make a batch known to its owner and to the workers. model: empty if it is not known before the
        input is checked. Raises Rejected (429) if too many of the owner's are running."""
        keys = batch_key(record.batch_id), batches_key(record.owner), BATCHES_RUNNING
        asked = table(id=record.batch_id, now=time.time(), ttl=TTL_S, max_running=MAX_RUNNING, max_kept=MAX_KEPT)
        values = (
            "record",
            msgpack.packb(asdict(record)),
            "status",
            "validating",
            "traceparent",
            traceparent,
            "model",
            model,
        )
        with redis_errors_as_503():
            async with self.client.pipeline(transaction=True) as pipe:
                CREATE_BATCH.call(pipe, keys, asked, *values)
                queue_created(pipe, record.created_at)
                is_made, *_ = await pipe.execute()
        if not is_made:
            raise Rejected(f"{MAX_RUNNING} batches are running already", status=429, retry_after_s=60)
        return Batch(record, "validating", {}, model=model)

    async def load(self, batch_id: str, tenant: Tenant) -> Batch:
        """Raises Invalid (404) for one that is not there for this tenant."""
        with redis_errors_as_503():
            values: Any = await self.client.hgetall(batch_key(batch_id))
            batch = read_batch(batch_id, values)
        if batch is None or not tenant.sees(batch.record.owner):
            raise Invalid(
                f"No batch found with id '{shortened(batch_id)}'.", param="batch_id", code="batch_not_found", status=404
            )
        return batch

    async def list_of(self, owner: str, after: str | None, count: int) -> list[Batch]:
        """List at most so many of an owner's batches, the newest first, from the one after `after`.
        Raises Invalid if that is not among them."""
        with redis_errors_as_503():
            place: Any = await self.client.zrevrank(batches_key(owner), after) if after is not None else -1
            if place is None:
                raise Invalid(f"no object {after!r} in this list", param="after")
            found: Any = await self.client.zrevrange(batches_key(owner), place + 1, place + count)
            names = [name.decode(errors="replace") for name in found]
            async with self.client.pipeline(transaction=False) as pipe:
                for name in names:
                    pipe.hgetall(batch_key(name))
                values = await pipe.execute()
            if gone := [name for name, value in zip(found, values, strict=True) if not value]:
                await self.client.zrem(batches_key(owner), *gone)
        return [
            batch for name, value in zip(names, values, strict=True) if (batch := read_batch(name, value)) is not None
        ]

    async def running(self) -> list[Batch]:
        """The batches of all owners that have not ended, the newest first."""
        with redis_errors_as_503():
            names: Any = await self.client.smembers(BATCHES_RUNNING)
            async with self.client.pipeline(transaction=False) as pipe:
                keys = [name.decode(errors="replace") for name in names]
                for key in keys:
                    pipe.hgetall(batch_key(key))
                found = [
                    batch
                    for key, values in zip(keys, await pipe.execute(), strict=True)
                    if (batch := read_batch(key, values)) is not None
                ]
        return sorted(found, key=lambda each: each.record.created_at, reverse=True)

    async def move(self, batch_id: str, allowed: tuple[str, ...], status: str, **values: Any) -> str | None:
        """Give a batch the status, and further fields, if its present status is among those allowed.
        Returns the status that it has then; None if there is no such batch."""
        pairs = [each for name, value in values.items() for each in (name, value)]
        asked = table(
            id=batch_id,
            allowed=allowed,
            status=status,
            is_end=status not in RUNNING,
            now=int(time.time()),
            figures_ttl=FILE_TTL_S,
        )
        keys = [batch_key(batch_id), BATCHES_RUNNING, BATCH_FIGURES]
        present = await MOVE_BATCH.run(self.client, keys, asked, *pairs)
        return present.decode() if present is not None else None

    async def begin(self, batch_id: str, total: int, model: str) -> None:
        """Note that a batch's input is right: its number of lines, and its model. It is in progress then,
        unless it was cancelled."""
        await BEGIN_BATCH.run(self.client, [batch_key(batch_id)], int(time.time()), "total", total, "model", model)

    async def delete(self, record: BatchRecord) -> None:
        """Forget a batch that has ended."""
        with redis_errors_as_503():
            async with self.client.pipeline(transaction=True) as pipe:
                pipe.delete(batch_key(record.batch_id))
                pipe.zrem(batches_key(record.owner), record.batch_id)
                await pipe.execute()


def read_batch(batch_id: str, values: dict[bytes, bytes]) -> Batch | None:
    """The batch in a hash. None if the hash is empty; also, with an error in the log, if it is no batch
    or its id is not that of its key."""
    if not values:
        return None
    try:
        batch = _batch_of({key.decode(): value for key, value in values.items()})
        if not is_batch_id(batch_id) or batch.record.batch_id != batch_id:
            raise Invalid("its id is not that of its key, or could be none")
    except (Invalid, ValueError, KeyError) as error:
        log.error("a batch in Redis can't be read", batch_id=batch_id[:128], error=error)
        return None
    return batch


def _batch_of(texts: dict[str, bytes]) -> Batch:
    """Raises Invalid, ValueError or KeyError for what is no batch."""
    record = decode_record(BatchRecord, texts["record"])
    if not is_file_id(record.input_file_id):
        raise Invalid("its input_file_id could be no file's")
    return Batch(
        record,
        texts["status"].decode(),
        {key.removesuffix("_at"): int(value) for key, value in texts.items() if key.endswith("_at")},
        int(texts.get("total", 0)),
        Totals(*(int(texts.get(each.name, 0)) for each in fields(Totals))),
        texts.get("model", b"").decode(),
        texts.get("output_file_id", b"").decode(),
        texts.get("error_file_id", b"").decode(),
        orjson.loads(texts["errors"]) if "errors" in texts else None,
        texts.get("traceparent", b"").decode(),
        int(texts.get("num_begun", 0)),
    )
