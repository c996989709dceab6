"""A generation's events to an HTTP response: a stream of server-sent events, or one JSON body. Both end when the client goes away."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from typing import Any

import orjson
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from services.gateway.errors import RequestFailed, error_body
from services.gateway.generation import Generation
from services.gateway.metrics import Measured
from services.gateway.openai.formats import Choice, format_for
from services.gateway.sse import DONE, PING, encode_event, format_id
from shared.messages import RequestError, TokenEvent
from shared.telemetry import get_logger

log = get_logger("penstock.gateway")

CLIENT_CLOSED = 499  # nginx's status for a client that went away; nobody reads it


class EventStream(Response):
    """Sends chunks until they end or the client goes away, and then, whichever came first, calls on_close."""

    def __init__(self, chunks: AsyncIterator[bytes], on_close: Callable[[], None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.chunks = chunks
        self.on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send_all(send))
        gone = asyncio.create_task(until_disconnect(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, gone):
                task.cancel()
            results = await asyncio.gather(sending, gone, return_exceptions=True)
            self.on_close()
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self.chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Responder:
    """One response in the making: owns its generation, its place in the admission count, and its measurements."""

    def __init__(self, generation: Generation, held: ExitStack, measured: Measured, ping_interval_s: float) -> None:
        self.generation = generation
        self.held = held
        self.measured = measured
        self.ping_interval_s = ping_interval_s
        self.format = format_for(generation.record)
        self.choices = [Choice(index) for index in range(len(generation.request_ids))]
        self._closing: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Give the place back and cancel what is unfinished. Runs to its end even if the caller is being cancelled."""
        if self._closing is None:
            self.held.close()
            self.measured.finish(self.choices)
            self._closing = asyncio.create_task(self.generation.close())
            BACKGROUND.add(self._closing)
            self._closing.add_done_callback(BACKGROUND.discard)

    async def whole(self, request: Request) -> Response:
        """All events, then one JSON body."""
        collecting = asyncio.create_task(self._collect())
        gone = asyncio.create_task(until_disconnect(request.receive))
        try:
            await asyncio.wait({collecting, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                return Response(status_code=CLIENT_CLOSED)
            collecting.result()
            return Response(orjson.dumps(self.format.whole(self.choices)), media_type="application/json")
        finally:
            for task in (collecting, gone):
                task.cancel()
            await asyncio.gather(collecting, gone, return_exceptions=True)
            self.close()

    async def stream(self, *, is_resumed: bool = False) -> Response:
        """Server-sent events. What fails before the first event is an ordinary HTTP error; while a request waits, comments keep the stream open."""
        events = self.generation.events()
        first = asyncio.ensure_future(anext(events, None))
        try:
            await asyncio.wait({first}, timeout=self.ping_interval_s)
            if first.done() and (result := first.result()) is not None:
                check(result[1])
        except BaseException:
            first.cancel()
            self.close()
            raise
        return EventStream(self._chunks(events, first, is_resumed), self.close)

    async def _collect(self) -> None:
        async for index, event in self.generation.events():
            check(event)
            self._add(index, event)

    async def _chunks(
        self, events: AsyncIterator[tuple[int, TokenEvent]], following: "asyncio.Future[tuple[int, TokenEvent] | None]", is_resumed: bool
    ) -> AsyncIterator[bytes]:
        positions = self.generation.positions if is_resumed else [0] * len(self.choices)
        for index, position in enumerate(positions):
            if position == 0 and (opening := self.format.opening(index)) is not None:
                yield encode_event(opening)
        try:
            while True:
                while not (await asyncio.wait({following}, timeout=self.ping_interval_s))[0]:
                    yield PING
                if (result := following.result()) is None:
                    break
                index, event = result
                check(event)
                following = asyncio.ensure_future(anext(events, None))
                self._add(index, event)
                positions[index] = event.position
                for chunk in self.format.chunks(self.choices[index], event):
                    yield encode_event(chunk, format_id(positions))
            if self.generation.record.has_usage:
                yield encode_event(self.format.usage_chunk(self.choices), format_id(positions))
        except RequestFailed as failed:
            error = failed.error
            yield encode_event(error_body(error.status, error.message, error.param, error.code))
        finally:
            following.cancel()
        yield DONE

    def _add(self, index: int, event: TokenEvent) -> None:
        self.measured.token(event)
        self.choices[index].add(event)


BACKGROUND: set[asyncio.Task[Any]] = set()  # cancellations on their way: asyncio keeps no strong reference to a task


def check(event: TokenEvent) -> None:
    """Raises RequestFailed for an event that ends the response with an error."""
    if event.finish_reason == "error":
        raise RequestFailed(event.error or RequestError("the request failed"))
    if event.finish_reason == "cancelled":
        raise RequestFailed(RequestError("the request was cancelled", CLIENT_CLOSED, code="cancelled"))
