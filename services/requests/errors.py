"""Errors of requests that failed in the pipeline, and errors as OpenAI sends them: `{"error":
{"message", "type", "param", "code"}}`, in a body and in a stream."""

from typing import Any

from shared.model.context_length import CODE as TOO_LONG
from shared.model.context_length import sizes_of
from shared.wire.messages import RequestError, TokenEvent

NO_REPLICA = "no_replica"  # the code of a request that waited in vain for a replica to be started
GONE = RequestError("the request was lost: Redis has lost its data", 500, code="request_lost")
TOO_MUCH = RequestError("too many long responses are followed at this gateway", 429, code="too_many_streams")

TYPE_BY_STATUS = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    409: "conflict_error",
    429: "rate_limit_error",
    503: "unavailable_error",
    504: "timeout_error",
}

CODE_BY_STATUS = {400: "invalid_value", 413: "body_too_large"}  # of errors that have no code of their own
CLIENT_CLOSED = 499  # nginx's status for a client that went away


class RequestFailed(Exception):
    """A stage failed the request; `error` is its word."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message)
        self.error = error


def type_of(status: int) -> str:
    """OpenAI's word for the kind of error that a status is of."""
    return TYPE_BY_STATUS.get(status, "invalid_request_error" if status < CLIENT_CLOSED else "server_error")


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    code = code or CODE_BY_STATUS.get(status)
    told = {"message": message, "type": type_of(status), "param": param, "code": code}
    return {"error": told | context_sizes(message, code)}


def context_sizes(message: str, code: str | None) -> dict[str, int]:
    """The sizes of a prompt that is too long, under llama.cpp's names."""
    found = sizes_of(message) if code == TOO_LONG else None
    return {"n_prompt_tokens": found[0], "n_ctx": found[1]} if found is not None else {}


def check(event: TokenEvent) -> None:
    """Raises RequestFailed for an event that ends the response with an error."""
    if event.finish_reason in ("error", "cancelled"):
        raise RequestFailed(error_of(event))


def error_of(event: TokenEvent) -> RequestError:
    """The error that an event ends with."""
    if event.finish_reason == "cancelled":
        return RequestError("the request was cancelled", CLIENT_CLOSED, code="cancelled")
    return event.error or RequestError("the request failed")


def draining(response_id: str) -> RequestError:
    return RequestError(
        f"the gateway is shutting down: resume with GET /v1/streams/{response_id}", 503, code="gateway_draining"
    )
