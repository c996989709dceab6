"""HTTP on a connection, with patience that ends: for headers that trickle in or never end, and for
a client that does not read what it asked for.

uvicorn itself only closes connections that are idle between two requests. A body's time is bounded
where it is read (bodies.py).
"""

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import orjson
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.requests.errors import error_body
from shared.process.settings import GatewaySettings
from shared.process.telemetry import get_logger

log = get_logger("penstock.gateway")

MAX_HEAD_BYTES = 64 << 10  # of a request's line and headers, or of a body's trailers


def last_reply(status: HTTPStatus, message: str, code: str, headers: bytes = b"") -> bytes:
    """A response that ends its connection, as bytes: it is written before there is a request to
    answer."""
    body = orjson.dumps(error_body(status, message, None, code))
    head = b"HTTP/1.1 %d %b\r\nContent-Type: application/json\r\n%bConnection: close\r\nContent-Length: %d\r\n\r\n"
    return head % (status, status.phrase.encode(), headers, len(body)) + body


TOO_MANY = last_reply(
    HTTPStatus.SERVICE_UNAVAILABLE,
    "the gateway has too many connections",
    "too_many_connections",
    b"Retry-After: 1\r\n",
)
TOO_LONG = last_reply(
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
    f"the request's headers are longer than {MAX_HEAD_BYTES} bytes",
    "headers_too_long",
)


NO_HTTP = last_reply(HTTPStatus.BAD_REQUEST, "this is no HTTP/1.1 request", "invalid_http")


def is_news(record: logging.LogRecord) -> bool:
    """Drops uvicorn's warnings of input that any client can send: bytes that are no HTTP, which
    `send_400_response` answers, and upgrades, which a server may pass over (RFC 9110, section 7.8)."""
    return not record.getMessage().startswith(("Invalid HTTP request", "Unsupported upgrade", "No supported WebSocket"))


class PatientProtocol(HttpToolsProtocol):
    """uvicorn's protocol with four bounds: on the time for headers and on their bytes, on the time
    without reading, and on connections.

    An idle connection is closed by uvicorn itself, in order; bytes that begin no request must not
    keep it open for longer.
    """

    header_timeout_s: float
    keep_alive_timeout_s: float
    write_timeout_s: float
    max_connections: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.app = Unchunked(self.app, self)
        self._is_one_too_many = False
        self._num_head_bytes = 0  # received since a head or a piece of a body was whole
        self._header_timer = Timer(self.loop, lambda: self.cut("its headers did not come"))
        self._write_timer = Timer(self.loop, lambda: self.cut("it does not read"))

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._is_one_too_many = len(self.connections) > self.max_connections
        self._header_timer.arm(self.header_timeout_s)
        if len(self.connections) > 2 * self.max_connections:
            self.cut("there are far too many")

    def connection_lost(self, exc: Exception | None) -> None:
        self._header_timer.disarm()
        self._write_timer.disarm()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """Answer what the parser does not read, as errors are everywhere."""
        log.info("request refused", status=400, error="invalid_http")
        self.transport.write(NO_HTTP)
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self._is_one_too_many and not self.transport.is_closing():
            self.transport.write(TOO_MANY)
            self.transport.close()
        elif not self.transport.is_closing():
            self._num_head_bytes += len(data)
            super().data_received(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:  # the parser keeps all of a head until it ends
                self.refuse_head()

    def on_message_begin(self) -> None:
        # else the next request has time until this one is answered
        if self.cycle is None or self.cycle.response_complete:
            self._header_timer.arm(self.header_timeout_s)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._header_timer.disarm()
        self._num_head_bytes = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._num_head_bytes = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            # The rest of a body that is not read has as long as headers: many clients read the
            # answer only when they have sent all
            self._header_timer.arm(self.header_timeout_s + (0 if self.cycle.more_body else self.keep_alive_timeout_s))

    def on_message_complete(self) -> None:
        self._num_head_bytes = 0
        super().on_message_complete()
        if self.cycle.response_complete:
            self._header_timer.arm(self.header_timeout_s + self.keep_alive_timeout_s)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer.arm(self.write_timeout_s)

    def resume_writing(self) -> None:
        self._write_timer.disarm()
        super().resume_writing()

    def refuse_head(self) -> None:
        """Say so, unless that would be in the middle of another answer."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.write(TOO_LONG)
            self.transport.close()
        else:
            self.cut("its headers are too long")

    def cut(self, reason: str) -> None:
        """Close without waiting for what is still to be written: the client has gone."""
        log.info("connection cut", client=self.client, reason=reason)
        self.transport.abort()


class Unchunked:
    """HTTP/1.0 knows no chunks, and some proxies speak it by default: a stream is its bytes, and
    ends with the connection, as uvicorn ends it anyway."""

    def __init__(self, app: Any, protocol: PatientProtocol) -> None:
        self.app = app
        self.protocol = protocol

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["http_version"] != "1.0":
            await self.app(scope, receive, send)
            return
        cycle, is_endless = self.protocol.cycle, False

        async def send_plain(message: Message) -> None:
            nonlocal is_endless
            if message["type"] == "http.response.start":
                is_endless = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
                cycle.chunked_encoding = False if is_endless else None
                cycle.keep_alive = cycle.keep_alive and not is_endless
            elif is_endless:
                # of each piece: there is no length of all
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self.app(scope, receive, send_plain)


class Timer:
    """Calls `action` when it was armed, and neither disarmed nor armed again for delay_s."""

    def __init__(self, loop: asyncio.AbstractEventLoop, action: Callable[[], None]) -> None:
        self.loop = loop
        self.action = action
        self._handle: asyncio.TimerHandle | None = None

    def arm(self, delay_s: float) -> None:
        self.disarm()
        self._handle = self.loop.call_later(delay_s, self.action)

    def disarm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


def patient(settings: GatewaySettings) -> type[PatientProtocol]:
    """The protocol with these bounds: what uvicorn's `http=` takes."""
    names = ("header_timeout_s", "keep_alive_timeout_s", "write_timeout_s", "max_connections")
    return type("Patient", (PatientProtocol,), {name: getattr(settings, name) for name in names})
