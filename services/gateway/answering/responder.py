"""A generation's events to an HTTP response: a stream of server-sent events, or one JSON body. Both
end when the client goes away."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import orjson
from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from services.gateway.answering.timings import timings
from services.gateway.generation.generation import Generation
from services.gateway.generation.subscription import ResponseFailed
from services.gateway.http.disconnect import until_disconnect
from services.gateway.telemetry.measured import ResponseMeter
from services.requests.errors import CLIENT_CLOSED, RequestFailed, check, error_body, error_of
from services.requests.text.answers.choice import Choice
from services.requests.text.answers.formats import Frames, format_for, is_plain, whole_body
from services.requests.text.answers.schema_errors import schema_errors, while_checked
from services.requests.text.answers.sse import DONE, PING, PING_AMONG_IDS, STARTING, encode_event, event_head, format_id
from services.requests.workers.grammars.answers import unchecked
from shared.process.telemetry import get_logger
from shared.wire.messages import RequestError, TokenEvent

log = get_logger("penstock.gateway")

T = TypeVar("T")

BEHIND_S = 0.1  # a client that took so long to take some events gets those that came meanwhile as few


class EventStream(Response):
    """Sends chunks until they end or the client goes away, and then, whichever came first, calls
    on_close."""

    def __init__(
        self, chunks: AsyncIterator[bytes], on_close: Callable[[], None], media_type: str = "text/event-stream"
    ) -> None:
        super().__init__(media_type=media_type, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
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


class Responder:
    """One response in the making: owns its generation and its measurements."""

    media_type = "text/event-stream"  # of streams

    def __init__(
        self,
        generation: Generation,
        measured: ResponseMeter,
        ping_interval_s: float,
        *,
        has_positions: bool = False,
        has_timings: bool = False,
    ) -> None:
        """has_positions: with each event of a stream goes the position to resume after;
        has_timings: the answer and its chunks say how long they took."""
        self.generation = generation
        self.has_positions, self.has_timings = has_positions, has_timings
        self.measured = measured
        timelines = [generation.subscription.timelines[request_id] for request_id in generation.request_ids]
        measured.begin(generation.record, generation.positions, timelines, generation.max_tokens)
        self.ping_interval_s = ping_interval_s
        self.format = format_for(generation.record)
        self.frames = Frames(self.format, generation.record)
        self.choices = [Choice.begin(index, generation.record) for index in range(len(generation.request_ids))]
        self._is_closed = False

    def close(self) -> None:
        """Have what is unfinished cancelled. Safe to call twice."""
        if not self._is_closed:
            self._is_closed = True
            self.generation.close()
            self.measured.finish()

    async def whole(self, request: Request) -> Response:
        """All events, then one JSON body."""
        collecting = asyncio.create_task(self._collect())
        gone = asyncio.create_task(until_disconnect(request.receive))
        try:
            await asyncio.wait({collecting, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not collecting.done():
                return Response(status_code=CLIENT_CLOSED)
            collecting.result()
            is_long = any(choice.prompt_logprobs is not None or choice.embedding is not None for choice in self.choices)
            return Response(
                await aside(lambda: orjson.dumps(self._body(), option=orjson.OPT_SERIALIZE_NUMPY), is_long=is_long),
                media_type="application/json",
            )
        finally:
            for task in (collecting, gone):
                task.cancel()
            await asyncio.gather(collecting, gone, return_exceptions=True)
            self.close()

    async def stream(self) -> Response:
        """Server-sent events. What fails before the first event is an ordinary HTTP error; while a
        request waits, pings keep the stream open."""
        try:
            first = await self._next()
            if first:
                check(first[0][1])
        except BaseException:
            self.close()
            raise
        return EventStream(self._chunks(first), self.close, self.media_type)

    def _body(self) -> dict[str, Any]:
        return whole_body(self.generation.record, self.choices) | self._timings(0)

    def _timings(self, index: int) -> dict[str, Any]:
        """The field of an answer, where it is asked for, of one of its choices."""
        return {"timings": timings(self.choices[index], self.measured)} if self.has_timings else {}

    @property
    def _is_over(self) -> bool:
        """Every sequence has ended, and been written."""
        return all(choice.finish_reason is not None for choice in self.choices)

    async def _next(self) -> list[tuple[int, TokenEvent]]:
        """Events, measured as they come. Raises RequestFailed if the response ends without its
        sequences."""
        try:
            batch = await self.generation.next(self.ping_interval_s)
        except ResponseFailed as failed:
            self.measured.failure = failed.error
            raise RequestFailed(failed.error) from None
        for index, event in batch:
            self.measured.event(index, event)
            if event.finish_reason in ("error", "cancelled"):
                self.measured.failure = self.measured.failure or error_of(event)
        return batch

    async def _collect(self) -> None:
        while not self._is_over:
            batch = await self._next()
            await self._check_ends(batch)
            for index, event in batch:
                check(event)
                self.choices[index].add(event)

    async def _check_ends(self, batch: list[tuple[int, TokenEvent]]) -> None:
        """Hold the answers that end here against what of their schemas could not be enforced."""
        ends = (
            [index for index, event in batch if event.finish_reason == "stop"] if self.generation.record.checks else []
        )
        await asyncio.gather(*(self._check_end(index, batch) for index in ends))

    async def _check_end(self, index: int, batch: list[tuple[int, TokenEvent]]) -> None:
        record, choice = self.generation.record, self.choices[index]
        is_resumed = record.parsing is None and self.generation.positions[index]
        before = await self.generation.text_before(index) if is_resumed else ""
        if before is None:
            choice.schema_errors = [unchecked("the stream was resumed, and its beginning is not there any more")]
        else:
            text = "".join([before, *choice.text, *(each.text for at, each in batch if at == index)])
            choice.schema_errors = await schema_errors(self.generation.pipeline.answer_checker, record, text)

    async def _chunks(self, batch: list[tuple[int, TokenEvent]]) -> AsyncIterator[bytes]:
        """The stream's bytes, beginning with a batch of events that was waited for already."""
        positions = list(self.generation.positions)
        unopened = [index for index, position in enumerate(positions) if position == 0]
        failure: RequestError | None = None
        is_behind = False
        while True:
            if self.generation.record.checks:
                async for _ in while_checked(self._check_ends(batch), self.ping_interval_s):
                    yield self._ping()
            if any(event.prompt_logprobs is not None for _, event in batch):
                encoded, failure = await asyncio.to_thread(self._encode, batch, positions, joins=is_behind)
            else:
                encoded, failure = self._encode(batch, positions, joins=is_behind) if batch else (self._ping(), None)
            if batch and unopened:  # with the first tokens: clients take it for the first
                encoded, unopened = self._openings(unopened, batch[0][1]) + encoded, []
            given_at = self.measured.clock.monotonic()
            yield encoded
            is_behind = self.measured.clock.monotonic() - given_at > BEHIND_S
            if failure is not None or self._is_over:
                break
            try:
                batch = await self._next()
            except RequestFailed as failed:
                failure = failed.error
                break
        if failure is not None:
            yield encode_event(error_body(failure.status, failure.message, failure.param, failure.code))
        elif self.generation.record.has_usage:
            yield encode_event(self.format.usage_chunk(self.choices), self._id(positions))
        yield DONE

    def _ping(self, usual: bytes = PING) -> bytes:
        """The bytes that keep a waiting stream open. usual: while no replica is missing."""
        ping = PING_AMONG_IDS if self.has_positions else usual
        return STARTING.get(ping, ping) if self.generation.is_starting else ping

    def _openings(self, indices: list[int], first: TokenEvent) -> bytes:
        """The first chunks of choices. first: the first event of any, for all have one prompt."""
        chunks = [self.format.opening(index, first) for index in indices]
        return b"".join(encode_event(chunk) for chunk in chunks if chunk is not None)

    def _encode(
        self, batch: list[tuple[int, TokenEvent]], positions: list[int], *, joins: bool = False
    ) -> tuple[bytes, RequestError | None]:
        """A batch of events as bytes, up to the first that is an error. Raises `positions` as it
        goes. joins: a choice's plain events that follow each other become one."""
        encoded = bytearray()
        # of a choice: its last plain event, and the texts that are not encoded yet
        plain: tuple[Choice, TokenEvent, list[str]] | None = None

        def flush() -> None:
            nonlocal encoded, plain
            if plain is not None:
                encoded += (
                    event_head(self._id(positions))
                    + self.frames.encode(plain[0], plain[1], "".join(plain[2]))
                    + b"\n\n"
                )
                plain = None

        for index, event in batch:
            try:
                check(event)
            except RequestFailed as failed:
                flush()
                return bytes(encoded), failed.error
            choice = self.choices[index]
            if not joins or plain is None or plain[0] is not choice:
                flush()
            delta = choice.add(event)
            # the client has it: it is here for what follows
            is_known = event.token_id is not None and event.position <= self.generation.positions[index]
            if not is_known and self.frames.is_any and not self.has_timings and is_plain(event, delta):
                plain = choice, event, [*(plain[2] if plain is not None else ()), delta.content]
                positions[index] = max(event.position, positions[index])
                continue
            flush()
            if is_known:
                chunks = [self.format.end(choice)] if event.finish_reason is not None else []
            else:
                positions[index] = max(event.position, positions[index])
                chunks = self.format.chunks(choice, event, delta)
            for chunk in chunks:
                encoded += encode_event(chunk | self._timings(index), self._id(positions))
        flush()
        return bytes(encoded), None

    def _id(self, positions: list[int]) -> str | None:
        return format_id(positions) if self.has_positions else None


async def aside(work: Callable[[], T], *, is_long: bool) -> T:
    """Return what `work` returns. Long work runs in a thread, so that other streams go on
    meanwhile."""
    return await asyncio.to_thread(work) if is_long else work()
