"""OpenAI's batches: a file of requests, answered in their own time."""

import asyncio
import codecs
import time
import uuid
from contextlib import suppress
from typing import Any

import orjson
from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse

from services.gateway.api.batches.schemas import BatchBody
from services.gateway.context import context_of
from services.gateway.http.auth import check_sees_all
from services.gateway.http.docs import takes
from services.gateway.http.lists import page_of
from services.gateway.telemetry.traces import current_root
from services.requests.bodies.fields import MAX_NAME
from services.requests.store.batches.store import Batch, BatchRecord
from services.requests.store.client import redis_errors_as_503
from services.requests.store.files.storage import Storage
from shared.process.errors import Invalid
from shared.process.telemetry import get_logger
from shared.wire.streams import FILE_TTL_S

log = get_logger("penstock.gateway")

router = APIRouter(prefix="/v1/batches")

LOOKED_AT = 64 << 10  # bytes of a batch's input, before it is checked


@router.post("", openapi_extra=takes(BatchBody))
async def create(request: Request) -> JSONResponse:
    """Have the requests of a file answered."""
    context, body = await context_of(request).read(request, BatchBody)
    owner, now, window_s = context.tenant.tenant_id, int(time.time()), body.window_s
    try:
        file = await context.files.load(body.input_file_id, owner)
    except Invalid as error:
        raise Invalid(str(error), param="input_file_id", code="file_not_found") from None
    if file.purpose != "batch":
        raise Invalid(f"the file {file.file_id} has the purpose {file.purpose}, not batch", param="input_file_id")
    await context.files.check_room(owner, 0, max_size=context.settings.max_files_size)  # for what it will write
    ttl_s = body.output_expires_after.seconds if body.output_expires_after is not None else FILE_TTL_S
    record = BatchRecord(
        f"batch_{uuid.uuid4().hex}",
        context.tenant,
        body.endpoint,
        file.file_id,
        body.completion_window,
        now,
        now + window_s,
        body.metadata,
        ttl_s,
    )
    root = current_root()
    model = await asyncio.to_thread(model_of, context.files.storage, file.path)
    batch = await context.batches.create(record, root.traceparent if root is not None else "", model)
    await context.jobs.send(record.batch_id)
    log.info(
        "batch created",
        batch_id=record.batch_id,
        endpoint=record.endpoint,
        num_bytes=file.num_bytes,
        x_request_id=request.state.request_id,
    )
    return JSONResponse(batch.describe())


def model_of(storage: Storage, path: str) -> str:
    """The model that the file's first request names; empty: it can't be told from the file's
    beginning. The worker that checks all lines says it for good.
    """
    with suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        line, _, _ = storage.read(path, 0, LOOKED_AT).removeprefix(codecs.BOM_UTF8).lstrip().partition(b"\n")
        name = orjson.loads(line)["body"]["model"]
        return name if isinstance(name, str) and len(name) <= MAX_NAME else ""
    return ""


@router.get("")
async def list_batches(
    request: Request,
    after: str | None = None,
    limit: int = Query(20, ge=1, le=100),
    tenant: str | None = Query(None, max_length=64),
) -> JSONResponse:
    """The batches that there are, the newest first. tenant, for administrators: another's, by its
    id; or *: those of all that have not ended."""
    context = context_of(request)
    if tenant is None:
        listed = await context.batches.list_of(context.tenant.tenant_id, after, limit + 1)
        return JSONResponse(page_of(listed, None, limit, lambda each: each.record.batch_id, Batch.describe))
    check_sees_all(context.tenant)
    if tenant == "*":
        return JSONResponse(
            page_of(
                await context.batches.running(), after, limit, lambda each: each.record.batch_id, describe_with_tenant
            )
        )
    listed = await context.batches.list_of(tenant, after, limit + 1)
    return JSONResponse(page_of(listed, None, limit, lambda each: each.record.batch_id, describe_with_tenant))


def describe_with_tenant(batch: Batch) -> dict[str, Any]:
    """The object of the API, and whose it is."""
    return batch.describe() | {"tenant": {"id": batch.record.owner, "name": batch.record.tenant.name}}


@router.get("/{batch_id}")
async def retrieve(batch_id: str, request: Request) -> JSONResponse:
    """A batch as it is now."""
    context = context_of(request)
    return JSONResponse((await context.batches.load(batch_id, context.tenant)).describe())


@router.post("/{batch_id}/cancel")
async def cancel(batch_id: str, request: Request) -> JSONResponse:
    """End a batch: what has been answered by then is in its files."""
    context = context_of(request)
    batch = await context.batches.load(batch_id, context.tenant)
    with redis_errors_as_503():
        status = await context.batches.move(batch_id, ("validating", "in_progress"), "cancelling")
    if status != "cancelling":
        raise Invalid(
            f"Cannot cancel a batch with status '{status}'.", param="batch_id", code="batch_has_ended", status=409
        )
    if batch.status != "cancelling":
        await context.jobs.send(batch_id)
    return JSONResponse((await context.batches.load(batch_id, context.tenant)).describe())
