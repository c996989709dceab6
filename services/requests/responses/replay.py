"""Replay: a response's events as bytes, made once of its log for all who read them at a gateway."""

import asyncio
from collections import OrderedDict
from contextlib import suppress

import orjson

from services.requests.answers.translate import Fold, Json
from services.requests.grammars.answers import NOT_CHECKED
from services.requests.record import ResponseRecord
from services.requests.responses.events import ResponseEvents
from shared.wire.messages import RequestError, TokenEvent

MAX_KEPT = 32 << 20  # bytes of responses that have ended
MAX_FOLLOWED = 256 << 20  # of those that are being followed; then no more are
EVENT_BYTES = 64  # that an event takes beside its own


class Replay:
    """The events so far. An event's number is its place."""

    def __init__(self, record: ResponseRecord, asked: Json) -> None:
        self.record = record
        self.events = ResponseEvents(record, asked)
        self.fold = Fold(record, self.events)
        self.encoded: list[bytes] = []
        self.size = 0  # bytes
        self.num_followers = 0
        self.has_caught_up = False  # there was no more in the log
        self.interruption: RequestError | None = None  # why no more will come, though it has no end
        self.failure: Exception | None = None
        self.growing: asyncio.Task[None] | None = None  # while it is followed
        self._body = b""
        self._changed = asyncio.Event()
        self._take(self.events.opening(None))

    @property
    def is_over(self) -> bool:
        return self.fold.is_over

    @property
    def is_worth_keeping(self) -> bool:
        """Whether it will always be the same: another check may find out more, a log that was lost may come back."""
        return self.fold.choice.finish_reason not in (None, "error") and not any(
            each["message"].startswith(NOT_CHECKED) for each in self.fold.choice.schema_errors
        )

    def add(self, event: TokenEvent) -> None:
        self._take(self.fold.add(event))

    def _take(self, events: list[Json]) -> None:
        for event in events:
            self.encoded.append(self.events.encode(event))
            self.size += len(self.encoded[-1]) + EVENT_BYTES

    def body(self) -> bytes:
        """The response as it is now."""
        if self._body:
            return self._body
        found = orjson.dumps(self.events.whole())
        if self.is_over:
            self._body = found
            self.size += len(found)
        return found

    def interrupted(self, error: RequestError) -> bytes:
        return self.fold.encode(self.events.interrupted(error))

    def tell(self) -> None:
        """Wake all who wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self, timeout_s: float) -> None:
        """Wait for one, but no longer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()


class Replays:
    """The replays that are followed now, and of those that have ended the last used."""

    def __init__(self) -> None:
        self.followed: dict[str, Replay] = {}  # by response
        self._kept: OrderedDict[str, Replay] = OrderedDict()
        self._size = 0

    @property
    def is_full(self) -> bool:
        return sum(each.size for each in self.followed.values()) >= MAX_FOLLOWED

    def get(self, response_id: str) -> Replay | None:
        """One that has ended, or is followed."""
        if response_id in self._kept:
            self._kept.move_to_end(response_id)
            return self._kept[response_id]
        return self.followed.get(response_id)

    def let_go(self, replay: Replay) -> None:
        """It is followed no more."""
        if self.followed.get(replay.record.response_id) is replay:
            del self.followed[replay.record.response_id]

    def keep(self, replay: Replay) -> None:
        replay.body()  # counts, too
        if not replay.is_worth_keeping or replay.size > MAX_KEPT:
            return
        self.forget(replay.record.response_id)
        self._kept[replay.record.response_id] = replay
        self._size += replay.size
        while self._size > MAX_KEPT:
            self._size -= self._kept.popitem(last=False)[1].size

    def forget(self, response_id: str) -> None:
        if (found := self._kept.pop(response_id, None)) is not None:
            self._size -= found.size
