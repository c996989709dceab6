"""Errors as OpenAI sends them: `{"error": {"message", "type", "param", "code"}}`, the same shape in a body and in a stream."""

from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from shared.errors import Invalid, Recoverable, Rejected
from shared.messages import RequestError
from shared.telemetry import get_logger

log = get_logger("penstock.gateway")

TYPE_BY_STATUS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    503: "unavailable_error",
    504: "timeout_error",
}


class RequestFailed(Exception):
    """A stage failed the request; `error` is its word."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message)
        self.error = error


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": TYPE_BY_STATUS.get(status, "server_error"), "param": param, "code": code}}


def describe_validation(errors: Sequence[Any]) -> tuple[str, str | None]:
    """The first of pydantic's errors in one sentence, and the field it is about."""
    first = errors[0]
    # ("body", "messages", 0, "user", "content"): a tagged or plain union puts type names between the parts of the path
    path = [part for part in first["loc"] if part != "body" and not (isinstance(part, str) and ("[" in part or part in ("str", "int", "float")))]
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".") or None
    if first["type"] == "extra_forbidden":
        return f"unknown or unsupported field: {name}", name
    if first["type"] == "json_invalid":
        return f"the body is not JSON: {first.get('ctx', {}).get('error', first['msg'])}", None
    return f"{name or 'the body'}: {first['msg']}", name


async def on_invalid(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Invalid)
    return JSONResponse(error_body(error.status, str(error), error.param, error.code), error.status)


async def on_validation(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    message, param = describe_validation(error.errors())
    return JSONResponse(error_body(400, message, param), 400)


async def on_rejected(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, Rejected)
    code = "server_full" if error.status == 429 else "stage_missing"
    return JSONResponse(error_body(error.status, str(error), None, code), error.status, headers={"Retry-After": str(error.retry_after_s)})


async def on_failed(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestFailed)
    failure = error.error
    # What came too late is not to be sent again: OpenAI's clients repeat what fails with 5xx, unless told
    headers = {"X-Should-Retry": "false"} if failure.status == 504 else None
    return JSONResponse(error_body(failure.status, failure.message, failure.param, failure.code), failure.status, headers=headers)


async def on_away(_: Request, error: Exception) -> JSONResponse:
    log.warning("redis is away", error=error)
    return JSONResponse(error_body(503, "the pipeline is not reachable at the moment", None, "redis_away"), 503, headers={"Retry-After": "1"})


async def on_http(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return JSONResponse(error_body(error.status_code, str(error.detail)), error.status_code, headers=error.headers)


async def on_bug(_: Request, error: Exception) -> JSONResponse:
    log.error("unexpected error", error=repr(error))
    return JSONResponse(error_body(500, "internal error"), 500)


HANDLERS = {
    Invalid: on_invalid,
    RequestValidationError: on_validation,
    Rejected: on_rejected,
    RequestFailed: on_failed,
    Recoverable: on_away,
    HTTPException: on_http,
    Exception: on_bug,
}
