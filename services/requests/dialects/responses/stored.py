"""Stored responses: what was asked is a key of Redis, what was answered is the token log. Any
gateway reads both, and both live equally long.

What is kept of the request is the whole conversation, so that going on with it needs the response
before, and none of those before that. Of a chain of responses only the last two keep it: the items
of the others are the beginning of what their successor keeps, and so they name that. A successor
outlives them.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Any

import orjson
import redis
import redis.asyncio

from services.requests.bodies.fields import shortened
from services.requests.dialects.responses.replay import MAX_WHOLE, PIECE, ReplayedResponse, Replays
from services.requests.errors import GONE, TOO_MUCH, draining
from services.requests.store.admission.held import queue_delete, queue_rewrite
from services.requests.store.client import redis_errors_as_503
from services.requests.store.ending import end_response
from services.requests.store.record import ResponseRecord, find_record
from services.requests.store.tenants.tenant import Tenant
from services.requests.text.answers.schema_errors import schema_errors
from services.requests.text.answers.sse import PING
from services.requests.text.answers.translate import Fold, Json
from services.requests.workers.grammars.answers import AnswerChecker
from shared.process.errors import Invalid, Lost, Rejected
from shared.process.telemetry import get_logger
from shared.wire.entries import entries_of
from shared.wire.messages import RequestError, TokenEvent
from shared.wire.streams import MESSAGE, inflight_key, log_key, response_key, stored_key
from shared.wire.token_log import END, decode_entry, end_alone, parse_log
from shared.wire.transport import is_temporary

log = get_logger("penstock.gateway")

LONG_BYTES = 256 << 10
MAX_LINKS = 10_000  # from a response to the one that keeps its items
PAGE = 256  # entries of a log at a time: decoding more would stall other streams
SLICE = 32  # events, after which others have their turn
# so long a deleted response's log stays: the stage that is about to acknowledge its request must find the end
DELETED_LOG_TTL_S = 60
MAX_WAIT_S = 1.0  # for a log to grow, in one command: less than a gateway that drains has for its last words


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response's request, as it is stored."""

    asked: Json  # the fields of its object that repeat the request
    # the whole conversation that the model was given, but for the instructions; none, if another has it
    items: list[Json]
    holder: str = ""  # the response that has it
    num_items: int = 0  # that many are this one's, the holder's first

    def encode(self) -> bytes:
        whole = asdict(self)
        return orjson.dumps(whole if self.holder else {name: whole[name] for name in ("asked", "items")})


async def loads(packed: bytes) -> Any:
    """Decode JSON; what is long, where others do not wait for it."""
    return await asyncio.to_thread(orjson.loads, packed) if len(packed) > LONG_BYTES else orjson.loads(packed)


async def decode(packed: bytes) -> StoredResponse:
    """Raises Rejected (503) for what is no such record, or one of a newer version, which has other
    fields: a gateway of that version can read it.
    """
    try:
        return StoredResponse(**await loads(packed))
    except (TypeError, ValueError) as error:
        log.error("a stored response can't be read: was it written by a newer version?", error=error)
        reason = "this gateway can't read how the response is stored"
        raise Rejected(reason, status=503, retry_after_s=2, code="stored_response_unreadable") from None


class Store:
    """Stored responses, as a gateway finds them in Redis."""

    def __init__(
        self,
        client: "redis.asyncio.Redis",
        followers: "redis.asyncio.Redis",
        ping_interval_s: float,
        answers: AnswerChecker | None = None,
    ) -> None:
        """followers: a client of its own, each command of which may block. answers: what holds
        those that are read against their schemas; None: nothing.
        """
        self.client = client
        self.followers = followers
        self.answers = answers
        self.ping_interval_s = ping_interval_s
        self.wait_s = min(ping_interval_s, MAX_WAIT_S)
        self.replays = Replays()
        self._is_draining = False

    async def load(
        self, tenant: Tenant, response_id: str, *, of_all: bool = False
    ) -> tuple[ResponseRecord, StoredResponse]:
        """Raises Invalid (404) for what is not stored, not any more, or not by this tenant; of_all:
        or not to be seen by it."""
        with redis_errors_as_503():
            packed: Any = await self.client.get(stored_key(response_id))
            record = await find_record(self.client, tenant, response_id, of_all=of_all)
        if packed is None or record is None:
            raise not_found(f"Response with id '{shortened(response_id)}' not found.")
        return record, await decode(packed)

    async def items(self, stored: StoredResponse) -> list[Json]:
        """The whole conversation that the model was given. Raises Invalid (404) if the response
        that keeps it is gone.
        """
        found = stored
        for _ in range(MAX_LINKS):
            if not found.holder:
                return found.items[: stored.num_items] if stored.holder else found.items
            if (packed := await self._get(found.holder)) is None:
                break
            found = await decode(packed)
        raise not_found("the conversation is not stored any more")

    async def _get(self, response_id: str) -> bytes | None:
        with redis_errors_as_503():
            packed: Any = await self.client.get(stored_key(response_id))
        return None if packed is None else bytes(packed)

    async def hand_over(self, record: ResponseRecord, stored: StoredResponse) -> None:
        """Have the response before this one, which this one continues, name this one for its items:
        else each turn would keep all before it.
        """
        before = stored.asked.get("previous_response_id")
        if stored.holder or not before or (packed := await self._get(before)) is None:
            return
        found = await decode(packed)
        content = StoredResponse(found.asked, [], record.response_id, len(found.items)).encode()
        if found.holder or len(content) >= len(packed) or stored.items[: len(found.items)] != found.items:
            return
        with redis_errors_as_503():
            async with self.client.pipeline(transaction=False) as pipe:
                queue_rewrite(pipe, record.tenant_id, before, len(packed), content, record.response_id)
                await pipe.execute()

    async def _handed_back(self, record: ResponseRecord) -> tuple[str, int, bytes] | None:
        """How much the response before must keep when this one, which names its items, goes: its
        id, its kept length now, and the new one. None: nothing.
        """
        packed = await self._get(record.response_id)
        stored = await decode(packed) if packed is not None else StoredResponse({}, [])
        before = stored.asked.get("previous_response_id")
        kept = await self._get(before) if before else None
        if not before or kept is None or (found := await decode(kept)).holder != record.response_id:
            return None
        if stored.holder:
            changed = StoredResponse(found.asked, [], stored.holder, found.num_items)
        else:
            changed = StoredResponse(found.asked, stored.items[: found.num_items])
        return before, len(kept), changed.encode()

    async def read(
        self, record: ResponseRecord, stored: StoredResponse, *, is_checked: bool = True
    ) -> ReplayedResponse:
        """The response as its log has it now. is_checked: an answer that has ended is held against
        its schema. Raises Invalid (404) if the log has expired.
        """
        if (known := self.replays.get(record.response_id)) is not None and known.is_over:
            return known
        replay = self.replays.make(record, stored.asked)
        async for page in self._pages(record):
            await self._add(replay, page, is_checked=is_checked)
            if not replay.is_whole or replay.size > MAX_WHOLE:
                replay.drop_events()
        if replay.is_over and (is_checked or not record.checks):
            await self._keep(replay)
        return replay

    async def _keep(self, replay: ReplayedResponse) -> None:
        """Keep one that has ended, no longer than Redis does."""
        replay.body()
        if replay.is_worth_keeping and replay.is_whole:
            with redis_errors_as_503():
                left_ms = int(await self.client.pttl(stored_key(replay.record.response_id)))
            if left_ms > 0:
                self.replays.keep(replay, left_ms / 1000)

    async def _add(self, replay: ReplayedResponse, events: list[TokenEvent], *, is_checked: bool = True) -> None:
        """The events of a page; only the last may be an end."""
        async with replay.turn:
            for number, event in enumerate(events[:-1], 1):
                replay.add(event)
                if number % SLICE == 0:
                    await asyncio.sleep(0)  # a long log: others have their turn in between
        for event in events[-1:]:
            if is_checked:
                await self._check_end(replay.record, replay.fold, event)
            replay.add(event)

    async def _check_end(self, record: ResponseRecord, fold: Fold, event: TokenEvent) -> None:
        """Hold an answer that this event ends against what of its schema could not be enforced."""
        if self.answers is not None and record.checks and event.finish_reason == "stop":
            fold.choice.schema_errors = await schema_errors(
                self.answers, record, "".join([*fold.choice.text, event.text])
            )

    async def _pages(self, record: ResponseRecord) -> AsyncIterator[list[TokenEvent]]:
        (request_id,) = record.request_ids
        position, is_there = 0, False
        while True:
            with redis_errors_as_503():
                # at one moment: its end comes into the log, and it is in flight no more
                async with self.client.pipeline(transaction=True) as pipe:
                    pipe.xrange(log_key(request_id), min=f"({position}-0" if position else "-", count=PAGE)
                    pipe.hexists(inflight_key(record.served_model), request_id)
                    found: Any = await pipe.execute()
                entries, is_running = found
                is_there = is_there or bool(entries) or bool(is_running)
            if not is_there:
                raise not_found(f"Response with id '{record.response_id}' is too old.")
            events = self._parse(request_id, entries, position)
            yield events
            if len(entries) < PAGE or events[-1].finish_reason is not None:
                return
            position = events[-1].position

    def _parse(self, request_id: str, entries: Any, position: int) -> list[TokenEvent]:
        """The entries of a page; where the log is not whole, an end that says so."""
        try:
            return parse_log(entries, position)
        except Lost as error:
            gone = RequestError(f"{GONE.message}: {error}", 500, code=GONE.code)
            return [TokenEvent(request_id, position, None, "", finish_reason="error", error=gone)]

    async def has_ended(self, record: ResponseRecord) -> bool:
        with redis_errors_as_503():
            last: Any = await self.client.xrevrange(log_key(record.request_ids[0]), count=1)
        return bool(last) and END in last[0][1]

    def follow(self, record: ResponseRecord, asked: Json, after: int = -1) -> AsyncIterator[bytes]:
        """The response's events as bytes, those behind the event `after`, from its log and as the log
        grows, at the pace of its reader. Raises Rejected (429, 503)."""
        self.replays.check_room(record)
        return self._follow(record, asked, after + 1)

    async def _follow(self, record: ResponseRecord, asked: Json, place: int) -> AsyncIterator[bytes]:
        """place: of the next event."""
        replay = self.replays.join(record, asked)
        del asked  # the replay has it: his own copy may be large
        spoken_at = time.monotonic()
        try:
            while True:
                if replay.is_given_up:
                    replay = self.replays.go_on(replay, place)
                elif found := replay.piece(place):
                    place += len(found)
                    sent = b"".join(found)
                    for at in range(0, len(sent), PIECE):
                        yield sent[at : at + PIECE]
                    spoken_at = time.monotonic()
                elif replay.is_over:
                    return
                elif replay.failure is not None:
                    raise replay.failure
                elif replay.interruption is not None or (self._is_draining and replay.has_caught_up):
                    yield replay.interrupted(replay.interruption or draining(record.response_id))
                    return
                elif time.monotonic() - spoken_at >= self.ping_interval_s:
                    yield PING
                    spoken_at = time.monotonic()
                else:
                    await self._more(replay, max(0.0, spoken_at + self.ping_interval_s - time.monotonic()))
        finally:
            self.replays.leave(replay)

    async def _more(self, replay: ReplayedResponse, timeout_s: float) -> None:
        """Wait for the log's next page, but no longer. All who want it share one reading."""
        if replay.reading is None:
            if not self.replays.may_grow(replay):
                if replay.is_whole:
                    self.replays.give_up(replay)
                else:
                    replay.interruption = TOO_MUCH
                return
            replay.reading = asyncio.create_task(self._read_page(replay))
        await asyncio.wait({replay.reading}, timeout=timeout_s)

    async def _read_page(self, replay: ReplayedResponse) -> None:
        try:
            await self._read_on(replay)
        except Exception as error:  # the followers raise it
            self.replays.share_no_more(replay)
            replay.failure = error
        finally:
            replay.reading = None

    async def _read_on(self, replay: ReplayedResponse) -> None:
        """The log's next page, or nothing after a while."""
        record, (request_id,) = replay.record, replay.record.request_ids
        try:
            entries = await self._wait(request_id, replay.last_id)
            is_due = not entries and time.monotonic() - replay.heard_at >= self.ping_interval_s - self.wait_s
            end, is_known = await self._state(record, replay.last_id) if is_due else (None, True)
        except (redis.RedisError, OSError) as error:
            if not is_temporary(error):
                raise
            await asyncio.sleep(replay.backoff.failed(error))
            return
        replay.backoff.succeeded()
        if not is_known:
            self.replays.share_no_more(replay)
            replay.interruption = GONE
            return
        events = [end] if end is not None else self._parse(request_id, entries, replay.position)
        await self._add(replay, events)
        if entries:
            replay.position, replay.last_id = events[-1].position, entries[-1][0]
        if entries or is_due:
            replay.heard_at = time.monotonic()
        replay.has_caught_up = not entries
        if replay.is_whole and replay.size > MAX_WHOLE:
            self.replays.give_up(replay)
        elif replay.is_over and replay.is_whole:
            await self._keep(replay)

    def drain(self) -> None:
        """End the streams that follow logs: another gateway can go on with them."""
        self._is_draining = True

    async def _wait(self, request_id: str, last_id: bytes) -> Any:
        """The log's entries after this one, once there are some; none after a while."""
        key = log_key(request_id)
        return entries_of(await self.followers.xread({key: last_id}, count=PAGE, block=int(self.wait_s * 1000))).get(
            key.encode(), []
        )

    async def _state(self, record: ResponseRecord, last_id: bytes) -> tuple[TokenEvent | None, bool]:
        """The end that the log holds at last_id or before, and whether anything may still write one.

        A Redis that lost the log's last entries ends it before what was read of it.
        """
        (request_id,) = record.request_ids
        last: Any = await self.client.xrevrange(log_key(request_id), count=1)
        if last and END in last[0][1] and place(last[0][0]) <= place(last_id):
            return end_alone(decode_entry(last[0][0], last[0][1][MESSAGE])), True
        return None, bool(last) or bool(await self.client.hexists(inflight_key(record.served_model), request_id))

    async def cancel(self, record: ResponseRecord) -> None:
        """End the response as cancelled, now. What has ended stays as it is."""
        with redis_errors_as_503():
            await end_response(self.client, record)

    async def delete(self, record: ResponseRecord) -> None:
        """Forget the response; one that runs is cancelled."""
        await self.cancel(record)
        handed_back = await self._handed_back(record)
        with redis_errors_as_503():
            async with self.client.pipeline(transaction=False) as pipe:
                queue_delete(pipe, record.tenant_id, record.response_id)
                if handed_back is not None:
                    queue_rewrite(pipe, record.tenant_id, *handed_back)
                for key in (log_key(record.request_ids[0]), response_key(record.response_id)):
                    pipe.expire(key, DELETED_LOG_TTL_S)
                await pipe.execute()
        self.replays.forget(record.response_id)  # now: its end has come, and its followers have kept it


def not_found(message: str) -> Invalid:
    return Invalid(message, param="response_id", code="response_not_found", status=404)


def place(entry_id: bytes) -> tuple[int, int]:
    """An entry's place in its stream, to compare."""
    first, _, second = entry_id.partition(b"-")
    return int(first), int(second)
