"""Errors as OpenAI sends them: `{"error": {"message", "type", "param", "code"}}`, the same shape in
a body and in a stream; other APIs have their own."""

from collections.abc import Mapping
from typing import Any

import redis
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Scope

from services.gateway.http.encodings import TAKEN
from services.requests.dialects.anthropic.errors import error_of
from services.requests.errors import CLIENT_CLOSED, RequestFailed, context_sizes, error_body, type_of
from shared.model.context_length import CODE as TOO_LONG
from shared.process.errors import Invalid, Recoverable, Rejected
from shared.process.telemetry import get_logger
from shared.wire.line import reason_of, without_command
from shared.wire.transport import is_temporary

log = get_logger("penstock.gateway")

LLAMA_PATHS = (
    "/completion",
    "/completions",
    "/chat/completions",
    "/infill",
    "/embedding",
    "/embeddings",
    "/apply-template",
    "/props",
    "/slots",
    "/lora-adapters",
)
LLAMA_TYPES = {404: "not_found_error", 501: "not_supported_error"}  # where they are others than OpenAI's


def llama_error(status: int, message: str, param: str | None, code: str | None) -> dict[str, Any]:
    """The body for llama.cpp's endpoints: `code` is the status, and a prompt that is too long has a
    type of its own."""
    kind = "exceed_context_size_error" if code == TOO_LONG else LLAMA_TYPES.get(status) or type_of(status)
    return {"error": {"code": status, "message": message, "type": kind, "param": param} | context_sizes(message, code)}


def speaks_llama(scope: Scope) -> bool:
    """Whether a request is to one of llama.cpp's own endpoints, which are at the root."""
    return scope["path"] in LLAMA_PATHS or scope["path"].startswith("/slots/")


def speaks_anthropic(scope: Scope) -> bool:
    """Whether a request is Anthropic's API. The path says it; of the models, which OpenAI has under
    the same, the header that Anthropic's clients send."""
    path: str = scope["path"]
    return path.startswith("/v1/messages") or (
        path.startswith("/v1/models") and "anthropic-version" in Headers(scope=scope)
    )


def error_response(
    scope: Scope,
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """An error in the shape of the API that the request belongs to."""
    if speaks_anthropic(scope):
        body = error_of(status, message, code)
    else:
        make = llama_error if speaks_llama(scope) else error_body
        body = {"error": message} if scope["path"].startswith("/api/") else make(status, message, param, code)
    return JSONResponse(body, status, headers=headers)


def say_refused(request: Request, status: int, code: str | None) -> None:
    """The one line of a request that never was submitted."""
    log.info(
        "request refused",
        path=request.url.path[:128],
        status=status,
        error=code,
        x_request_id=getattr(request.state, "request_id", None),
    )


async def on_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Invalid)
    say_refused(request, error.status, error.code)
    # 408: the rest of the body may still come
    headers = {408: {"Connection": "close"}, 415: {"Accept-Encoding": ", ".join(TAKEN)}}.get(error.status)
    return error_response(request.scope, error.status, str(error), error.param, error.code, headers=headers)


async def on_validation(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return error_response(request.scope, 400, f"{first['loc'][-1]}: {first['msg']}", str(first["loc"][-1]))


async def on_rejected(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Rejected)
    say_refused(request, error.status, error.code)
    return error_response(
        request.scope, error.status, str(error), None, error.code, headers={"Retry-After": str(error.retry_after_s)}
    )


async def on_failed(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestFailed)
    failure = error.error
    # What came too late, or what this model can't do, is not to be sent again: OpenAI's clients
    # repeat what fails with 5xx, unless told
    headers = {501: {"X-Should-Retry": "false"}, 504: {"X-Should-Retry": "false"}, 503: {"Retry-After": "1"}}.get(
        failure.status
    )
    return error_response(request.scope, failure.status, failure.message, failure.param, failure.code, headers=headers)


async def on_away(request: Request, error: Exception) -> JSONResponse:
    log.warning("redis can't serve", error=reason_of(error))
    return error_response(
        request.scope,
        503,
        "the pipeline is not reachable at the moment",
        None,
        "redis_unavailable",
        headers={"Retry-After": "1"},
    )


async def on_redis(request: Request, error: Exception) -> JSONResponse:
    return await (on_away if is_temporary(error) else on_bug)(request, error)


async def on_gone(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)


async def on_http(request: Request, error: Exception) -> JSONResponse:
    """Answer the router's errors, above all for an unknown endpoint."""
    assert isinstance(error, HTTPException)
    path, message, code = request.url.path, str(error.detail), None
    if error.status_code == 404:
        message, code = f"there is no {request.method} {path[:128]} here; /docs lists what there is", "unknown_url"
    elif error.status_code == 405:
        message, code = f"{path[:128]} does not take {request.method}", "method_not_supported"
    return error_response(request.scope, error.status_code, message, None, code, headers=error.headers)


async def on_bug(request: Request, error: Exception) -> JSONResponse:
    log.error("unexpected error", error=repr(without_command(error)))
    return error_response(request.scope, 500, "internal error")


HANDLERS = {
    Invalid: on_invalid,
    RequestValidationError: on_validation,
    Rejected: on_rejected,
    RequestFailed: on_failed,
    Recoverable: on_away,
    redis.RedisError: on_redis,
    ClientDisconnect: on_gone,
    HTTPException: on_http,
    Exception: on_bug,
}
