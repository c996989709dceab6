"""The layers around every request: its X-Request-Id, one Host, a bound on its body, its count and
its span. Plain ASGI, so that streams pass untouched."""

import asyncio
import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.http.errors import error_response, speaks_anthropic
from services.gateway.telemetry.metrics import Metrics
from services.gateway.telemetry.traces import rooted, trace_headers
from services.requests.bodies.ignored import HEADER, collecting
from services.requests.errors import CLIENT_CLOSED
from shared.process.tracing import Tracer

UPLOAD_PATH = "/v1/files"
MULTIPART_BYTES = 16 << 10  # of an upload, in addition to the file
STREAMS = ("/v1/streams/", "/v1/responses/", "/live")  # what GET may stream
ID_PATTERN = re.compile(r"[\x21-\x7e]{1,128}")


class RequestId:
    """Echo the client's X-Request-Id, or make one up; Anthropic's clients read it as request-id."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if ID_PATTERN.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["X-Request-Id"] = request_id
                if speaks_anthropic(scope):
                    headers["request-id"] = request_id
            await send(message)

        await self.app(scope, receive, send_with_id)


class CutOff:
    """503 for a request that the server cancels at its own end, before its answer has begun: a gateway
    that was stopped while it drained has no time left for it."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self.app(scope, receive, noted)
        except asyncio.CancelledError:
            if has_begun or scope["type"] != "http":
                raise
            message = "the gateway is shutting down: send the request again"
            headers = {"Retry-After": "1"}
            await error_response(scope, 503, message, None, "gateway_draining", headers=headers)(scope, receive, send)


class OneHost:
    """400 for a request of HTTP/1.1 without a Host header, and for one with several: RFC 9112,
    section 3.2."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        num_hosts = len(Headers(scope=scope).getlist("host"))
        if num_hosts > 1 or (num_hosts == 0 and scope["http_version"] == "1.1"):
            message = f"a request of HTTP/1.1 has one Host header, this one has {num_hosts or 'none'}"
            return await error_response(scope, 400, message, None, "invalid_host", headers={"Connection": "close"})(
                scope, receive, send
            )
        await self.app(scope, receive, send)


class Slash:
    """A slash at the end of a path says nothing: no redirect, which behind a proxy would lead to
    http:// and lose the body. The playground's are files."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not scope["path"].startswith("/playground"):
            scope["path"] = scope["path"].rstrip("/") or "/"
        await self.app(scope, receive, send)


class HeadRequests:
    """HEAD is GET without the body, which the server leaves out: load balancers ask so. Not for a
    stream, whose reader it would become."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_head = scope["type"] == "http" and scope["method"] == "HEAD" and not scope["path"].startswith(STREAMS)
        await self.app({**scope, "method": "GET"} if is_head else scope, receive, send)


class BodyTooLong(Exception):
    """More came than Content-Length said, or than is allowed without one."""


class BodyLimit:
    """413 for a body above the bound, before it is in memory."""

    def __init__(self, app: ASGIApp, max_bytes: int, max_file_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.max_file_bytes = max_file_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        num_bytes, max_bytes = (
            0,
            self.max_file_bytes + MULTIPART_BYTES if scope["path"] == UPLOAD_PATH else self.max_bytes,
        )

        async def receive_bounded() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > max_bytes:
                raise BodyTooLong
            return message

        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        try:
            if length.isdigit() and int(length) > max_bytes:
                raise BodyTooLong
            await self.app(scope, receive_bounded, send)
        except BodyTooLong:
            message = f"the body is longer than {max_bytes} bytes"
            # Who has asked whether to send the body does not; who has not asked is let send it, or
            # he would not read the answer
            closing = {"Connection": "close"} if "expect" in headers else None
            await error_response(scope, 413, message, headers=closing)(scope, receive, send)


class Ignored:
    """The header, on every answer that has something to say in it."""

    def __init__(self, app: ASGIApp, *, is_strict: bool) -> None:
        self.app = app
        self.is_strict = is_strict

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        with collecting(is_strict=self.is_strict) as names:

            async def send_with_names(message: Message) -> None:
                if message["type"] == "http.response.start" and names.names:
                    MutableHeaders(scope=message)[HEADER] = names.header()
                await send(message)

            await self.app(scope, receive, send_with_names)


TRACED_GETS = ("/v1/streams/", "/v1/responses/")  # those that may stream; of the others only what is POSTed is traced
METHODS = ("GET", "POST", "DELETE", "HEAD", "OPTIONS")


class Observed:
    """Counts each request by its status, and begins the span of its trace."""

    def __init__(self, app: ASGIApp, metrics: Metrics, tracer: Tracer | None) -> None:
        self.app = app
        self.metrics = metrics
        self.tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        status = CLIENT_CLOSED  # unless an answer begins

        async def send_observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        method = scope["method"] if scope["method"] in METHODS else "_OTHER"
        try:
            if self.tracer is None or not (method == "POST" or scope["path"].startswith(TRACED_GETS)):
                return await self.app(scope, receive, send_observed)
            with rooted(
                self.tracer, method, trace_headers(Headers(scope=scope)), {"http.request.method": method}
            ) as span:
                try:
                    await self.app(scope, receive, send_observed)
                finally:
                    span.update_name(f"{method} {route_of(scope)}")
                    span.set_attributes({"http.route": route_of(scope), "http.response.status_code": status})
        finally:
            self.metrics.http_requests.labels(method, route_of(scope), str(status)).inc()


def route_of(scope: Scope) -> str:
    """The path as the application declares it, so that there are as many as routes."""
    return str(getattr(scope.get("route"), "path", "other"))
