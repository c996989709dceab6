"""Anthropic's endpoints: messages, each of which is a chat inside, and batches of them, which are
OpenAI's batches inside. docs/use/other-apis.md says which fields are understood. Versions in
headers are accepted, and ignored."""

import asyncio
import io
import time
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from itertools import islice
from typing import IO

import orjson
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from services.gateway.answering.token_count import count_tokens
from services.gateway.answering.translated import TranslatedResponder
from services.gateway.context import GatewayContext, context_of
from services.gateway.http.docs import takes
from services.gateway.telemetry.measured import ResponseMeter
from services.gateway.telemetry.traces import current_root
from services.requests.dialects.anthropic.blocks import Json
from services.requests.dialects.anthropic.chat import NAME_HERE, chat_of
from services.requests.dialects.anthropic.errors import error_of
from services.requests.dialects.anthropic.events import MessageEvents
from services.requests.dialects.anthropic.schemas import CountTokensBody, MessageBatchBody, MessagesBody
from services.requests.dialects.openai.translate import own_terms
from services.requests.prepare import prepare
from services.requests.store.batches.store import MAX_KEPT, Batch, BatchRecord
from services.requests.store.client import redis_errors_as_503
from services.requests.store.files.store import FileRecord
from shared.process.errors import Invalid, Rejected
from shared.wire.streams import FILE_TTL_S

ENDPOINT = "/v1/messages"
WINDOW_S = 24 * 3600
LINES_AT_ONCE = 200
PREFIX = "msgbatch_"
NUM_REQUESTS = "requests"  # of a record's metadata: how many there are before a worker has looked
NO_COUNTS = {"processing": 0, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}


router = APIRouter(prefix="/v1/messages")


@router.post("", openapi_extra=takes(MessagesBody))
async def messages(request: Request) -> Response:
    """Answer a conversation."""
    context, body = await context_of(request).read(request, MessagesBody)
    chat = chat_of(body)
    measured = ResponseMeter(context.metrics)
    with own_terms(NAME_HERE):
        record, requests = await prepare(context, chat.intent(), "message", context.stage.replica_id)
    generation = await context.pipeline.submit(context.caller, record, requests)
    context.log_submitted(record, chat.user, request.state.request_id)
    responder = TranslatedResponder(generation, measured, context.settings.ping_interval_s, MessageEvents(record))
    return await (responder.stream() if body.stream else responder.whole(request))


@router.post("/count_tokens", openapi_extra=takes(CountTokensBody))
async def count(request: Request) -> Response:
    """How many tokens a conversation has, by the model's own template and tokenizer."""
    context, body = await context_of(request).read(request, CountTokensBody)
    return await count_tokens(
        context, request, chat_of(body), "message", NAME_HERE, lambda number: {"input_tokens": number}
    )


@router.post("/batches", openapi_extra=takes(MessageBatchBody))
async def create(request: Request) -> JSONResponse:
    """Have messages answered in their own time."""
    context, body = await context_of(request).read(request, MessageBatchBody)
    content = await asyncio.to_thread(lines_of, body, context)
    owner, now, batch_id = context.tenant.tenant_id, int(time.time()), f"{PREFIX}{uuid.uuid4().hex}"
    room = context.settings.max_files_size
    try:
        file = await context.files.add(
            io.BytesIO(content), owner, f"{batch_id}.jsonl", "batch", FILE_TTL_S, max_size=room
        )
    except TimeoutError:
        raise Rejected("the storage of files does not take the batch in time", status=503, retry_after_s=5) from None
    metadata = {NUM_REQUESTS: str(len(body.requests))}
    record = BatchRecord(
        batch_id, context.tenant, ENDPOINT, file.file_id, f"{WINDOW_S // 3600}h", now, now + WINDOW_S, metadata
    )
    root = current_root()
    try:
        batch = await context.batches.create(record, root.traceparent if root is not None else "")
    except Rejected:
        await context.files.delete(file)
        raise
    await context.jobs.send(batch_id)
    return JSONResponse(describe(batch))


def lines_of(body: MessageBatchBody, context: GatewayContext) -> bytes:
    """The requests as the lines of a batch's file. Raises Invalid for what no worker could read."""
    seen: set[str] = set()
    lines = []
    for number, each in enumerate(body.requests):
        if each.custom_id in seen:
            raise Invalid(
                f"requests[{number}].custom_id: {each.custom_id} stands twice: give each request its own",
                param=f"requests[{number}].custom_id",
            )
        seen.add(each.custom_id)
        model = each.params.get("model") or context.only_model()
        if not isinstance(model, str):
            raise Invalid(f"requests[{number}].params.model: expected a text", param=f"requests[{number}].params.model")
        line = orjson.dumps(
            {"custom_id": each.custom_id, "method": "POST", "url": ENDPOINT, "body": each.params | {"model": model}}
        )
        if len(line) > (longest := context.settings.max_body_bytes):
            raise Invalid(
                f"requests[{number}] has {len(line)} bytes, and at most {longest} are taken: shorten it",
                param=f"requests[{number}]",
                status=413,
            )
        lines.append(line)
    return b"\n".join(lines)


@router.get("/batches")
async def list_batches(
    request: Request, after_id: str | None = None, before_id: str | None = None, limit: int = Query(20, ge=1, le=1000)
) -> JSONResponse:
    """The batches that there are, the newest first."""
    context = context_of(request)
    listed = await context.batches.list_of(context.tenant.tenant_id, after_id, MAX_KEPT)
    names = [each.record.batch_id for each in listed]
    if before_id is not None and before_id not in names:
        raise Invalid(f"no batch {before_id[:64]!r} in this list", param="before_id")
    own = [
        each
        for each in listed[: names.index(before_id) if before_id is not None else None]
        if each.record.endpoint == ENDPOINT
    ]
    page = own[-limit:] if before_id is not None else own[:limit]
    ids = [each.record.batch_id for each in page]
    return JSONResponse(
        {
            "data": [describe(each) for each in page],
            "has_more": len(own) > limit,
            "first_id": ids[0] if ids else None,
            "last_id": ids[-1] if ids else None,
        }
    )


@router.get("/batches/{batch_id}")
async def retrieve(batch_id: str, request: Request) -> JSONResponse:
    """A batch as it is now."""
    return JSONResponse(describe(await load(context_of(request), batch_id)))


@router.post("/batches/{batch_id}/cancel")
async def cancel(batch_id: str, request: Request) -> JSONResponse:
    """End a batch: what has been answered by then is in its results."""
    context = context_of(request)
    batch = await load(context, batch_id)
    with redis_errors_as_503():
        status = await context.batches.move(batch_id, ("validating", "in_progress"), "cancelling")
    if status == "cancelling" and batch.status != "cancelling":
        await context.jobs.send(batch_id)
    return JSONResponse(describe(await load(context, batch_id)))


@router.delete("/batches/{batch_id}")
async def delete(batch_id: str, request: Request) -> JSONResponse:
    """Forget a batch that has ended, and its results."""
    context = context_of(request)
    batch = await load(context, batch_id)
    if batch.is_running:
        raise Invalid("the batch has not ended: cancel it first", param="batch_id")
    for file in await files_of(context, batch, batch.record.input_file_id, batch.output_file_id, batch.error_file_id):
        await context.files.delete(file)
    await context.batches.delete(batch.record)
    return JSONResponse({"id": batch_id, "type": "message_batch_deleted"})


@router.get("/batches/{batch_id}/results")
async def results(batch_id: str, request: Request) -> StreamingResponse:
    """The result of each request, one line of JSON each, in no order."""
    context = context_of(request)
    batch = await load(context, batch_id)
    if batch.is_running:
        raise Invalid("the batch has no results yet: wait until its processing_status is ended", param="batch_id")
    files = await files_of(context, batch, batch.output_file_id, batch.error_file_id)
    return StreamingResponse(result_lines(context, files), media_type="application/x-jsonl")


async def load(context: GatewayContext, batch_id: str) -> Batch:
    """Raises Invalid (404) for one that is not there, or not of this API."""
    batch = await context.batches.load(batch_id, context.tenant)
    if batch.record.endpoint != ENDPOINT:
        raise Invalid(
            f"No batch found with id '{batch_id[:64]}'.", param="batch_id", code="batch_not_found", status=404
        )
    return batch


async def files_of(context: GatewayContext, batch: Batch, *file_ids: str) -> list[FileRecord]:
    """The files that still exist."""
    files = {each.file_id: each for each in await context.files.list_of(batch.record.owner)}
    return [files[file_id] for file_id in file_ids if file_id in files]


async def result_lines(context: GatewayContext, files: list[FileRecord]) -> AsyncIterator[bytes]:
    for record in files:
        file = await asyncio.to_thread(context.files.storage.open, record.path)
        try:
            while lines := await asyncio.to_thread(next_lines, file):
                yield b"".join(orjson.dumps(result_of(orjson.loads(line))) + b"\n" for line in lines)
        finally:
            await asyncio.to_thread(file.close)


def next_lines(file: IO[bytes]) -> list[bytes]:
    return list(islice(file, LINES_AT_ONCE))


def result_of(line: Json) -> Json:
    """A line of a batch's output, as this API has it."""
    response, error = line["response"], line["error"]
    if response is None:
        kind = "expired" if error["code"] == "batch_expired" else "canceled"
        return {"custom_id": line["custom_id"], "result": {"type": kind}}
    if response["status_code"] == 200:
        return {"custom_id": line["custom_id"], "result": {"type": "succeeded", "message": response["body"]}}
    failure = response["body"]["error"]
    error_fields = error_of(response["status_code"], failure["message"], failure.get("code")) | {
        "request_id": response["request_id"]
    }
    return {"custom_id": line["custom_id"], "result": {"type": "errored", "error": error_fields}}


def describe(batch: Batch) -> Json:
    """The object of the API. Until a batch has ended, all of its requests are processing."""
    record, totals = batch.record, batch.totals
    ended = next(
        (batch.times[status] for status in ("completed", "failed", "expired", "cancelled") if status in batch.times),
        None,
    )
    total = batch.total or int((record.metadata or {}).get(NUM_REQUESTS, 0))
    counts = NO_COUNTS | {"processing": total}
    if not batch.is_running:
        closed = "expired" if batch.status == "expired" else "canceled"
        counts = NO_COUNTS | {"succeeded": totals.completed, "errored": totals.failed, closed: totals.not_executed}
    return {
        "id": record.batch_id,
        "type": "message_batch",
        "processing_status": "canceling"
        if batch.status == "cancelling"
        else "in_progress"
        if batch.is_running
        else "ended",
        "request_counts": counts,
        "created_at": time_text(record.created_at),
        "expires_at": time_text(record.expires_at),
        "ended_at": time_text(ended),
        "cancel_initiated_at": time_text(batch.times.get("cancelling")),
        "archived_at": None,
        "results_url": None if batch.is_running else f"{ENDPOINT}/batches/{record.batch_id}/results",
    }


def time_text(at_s: int | None) -> str | None:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if at_s is not None else None
