"""Errors as Anthropic sends them."""

from typing import Any

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

NO_THREADS = "thread_unsupported_request"
DETAILED = (NO_THREADS,)  # codes of Anthropic's own, on which its packages act


def error_of(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = {"details": {"error_code": code}} if code in DETAILED else {}
    return {"type": "error", "error": {"type": kind, "message": message} | details}
