"""OpenAI's files: what batches read, and what they write."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import IO, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.datastructures import FormData, UploadFile

from services.gateway.context import context_of
from services.gateway.http.lists import page_of
from services.requests.store.files.storage import PIECE_BYTES
from services.requests.store.files.store import FileRecord
from shared.process.errors import Invalid, Rejected
from shared.process.telemetry import get_logger
from shared.wire.streams import FILE_TTL_S

UPLOAD_TIMEOUT_S = 600.0
MAX_UPLOADS = 8  # at once; each may take a file's size on this machine's disk until it is stored
MAX_UPLOADS_OF_ONE = 4  # of one tenant, whose slow uploads then leave room for others'
MAX_FILENAME = 255
LEAST_TTL_S = 3600
PURPOSES = ("batch", "vision", "user_data")
FIELDS = ("file", "purpose", "expires_after[anchor]", "expires_after[seconds]")

log = get_logger("penstock.gateway")

router = APIRouter(prefix="/v1/files")
uploads = asyncio.Semaphore(MAX_UPLOADS)
uploads_of: Counter[str] = Counter()  # by tenant


@router.post("")
async def upload(request: Request) -> JSONResponse:
    """Keep a file: multipart/form-data with `file`, and `purpose`: batch, or vision or user_data for images."""
    context = context_of(request)
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        raise Invalid(
            "the upload is no multipart/form-data: send the file as one of its parts", code="invalid_content_type"
        )
    owner = context.tenant.tenant_id
    if uploads.locked() or (owner and uploads_of[owner] >= MAX_UPLOADS_OF_ONE):
        raise Rejected("too many files are being uploaded here", status=503, retry_after_s=5, code="too_many_uploads")
    async with uploads:
        uploads_of[owner] += 1
        try:
            form = await receive(request)
            try:
                file, ttl_s = read_form(form)
                filename = (file.filename or "upload.jsonl")[:MAX_FILENAME]
                limit = context.settings.max_files_size
                record = await context.files.add(file.file, owner, filename, "batch", ttl_s, max_size=limit)
            finally:
                await form.close()
        except OSError as error:
            log.error("a file can't be stored", error=error)
            raise Rejected(
                "files can't be stored here at the moment", status=503, retry_after_s=60, code="storage_unavailable"
            ) from None
        finally:
            uploads_of[owner] -= 1
            if not uploads_of[owner]:
                del uploads_of[owner]
    return JSONResponse(record.describe())


async def receive(request: Request) -> FormData:
    """The form, with its file in the temporary folder. Raises Invalid (408) for one that takes too
    long, OSError without room for it."""
    try:
        async with asyncio.timeout(UPLOAD_TIMEOUT_S):
            return await request.form(max_files=1, max_fields=len(FIELDS))
    except TimeoutError:
        raise Invalid(f"the file did not come within {UPLOAD_TIMEOUT_S:g} s", code="body_timeout", status=408) from None


def read_form(form: FormData) -> tuple[UploadFile, int]:
    """The file, and for how many seconds it is to be kept. Raises Invalid."""
    if unknown := next((name for name in form if name not in FIELDS), None):
        raise Invalid(f"unknown or unsupported field: {unknown[:64]}", param=unknown[:64], code="unknown_parameter")
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, UploadFile):
        raise Invalid("missing required parameter: file", param="file", code="missing_required_parameter")
    if purpose not in PURPOSES:
        reason, code = (
            f"purpose must be one of {', '.join(PURPOSES)}: files have no other use here",
            "missing_required_parameter" if purpose is None else None,
        )
        raise Invalid(reason, param="purpose", code=code)
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return file, FILE_TTL_S
    if anchor != "created_at":
        raise Invalid("expires_after.anchor must be created_at", param="expires_after.anchor")
    if not (isinstance(seconds, str) and seconds.isdecimal() and LEAST_TTL_S <= int(seconds) <= FILE_TTL_S):
        raise Invalid(
            f"expires_after.seconds must be a number from {LEAST_TTL_S} to {FILE_TTL_S}", param="expires_after.seconds"
        )
    return file, int(seconds)


@router.get("")
async def list_files(
    request: Request,
    purpose: str | None = None,
    after: str | None = None,
    limit: int = Query(10_000, ge=1, le=10_000),
    order: Literal["asc", "desc"] = "desc",
) -> JSONResponse:
    """The files that there are, the newest first."""
    context = context_of(request)
    records = [
        each
        for each in await context.files.list_of(context.tenant.tenant_id)
        if purpose is None or each.purpose == purpose
    ]
    return JSONResponse(
        page_of(
            records if order == "desc" else records[::-1], after, limit, lambda each: each.file_id, FileRecord.describe
        )
    )


@router.get("/{file_id}")
async def retrieve(file_id: str, request: Request) -> JSONResponse:
    """Describe a file."""
    context = context_of(request)
    return JSONResponse((await context.files.load(file_id, context.tenant.tenant_id)).describe())


@router.get("/{file_id}/content")
async def content(file_id: str, request: Request) -> StreamingResponse:
    """Send a file's content."""
    context = context_of(request)
    record = await context.files.load(file_id, context.tenant.tenant_id)
    try:
        file = await asyncio.to_thread(context.files.storage.open, record.path)
    except FileNotFoundError:
        raise Invalid(f"the content of {file_id} is gone", param="id", code="file_not_found", status=404) from None
    return StreamingResponse(
        pieces(file), media_type="application/octet-stream", headers={"Content-Length": str(record.num_bytes)}
    )


async def pieces(file: IO[bytes]) -> AsyncIterator[bytes]:
    try:
        while piece := await asyncio.to_thread(file.read, PIECE_BYTES):
            yield piece
    finally:
        await asyncio.to_thread(file.close)


@router.delete("/{file_id}")
async def delete(file_id: str, request: Request) -> JSONResponse:
    """Remove a file. A batch that was created with it goes on once its input has been checked: from
    then on it has what it needs."""
    context = context_of(request)
    await context.files.delete(await context.files.load(file_id, context.tenant.tenant_id))
    return JSONResponse({"id": file_id, "object": "file", "deleted": True})
