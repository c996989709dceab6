"""ReplayedResponse: a response's events as bytes, made of its log once for all who read them at a gateway."""

import asyncio
import time
from collections import OrderedDict, deque
from weakref import WeakValueDictionary

from services.requests.dialects.responses.events import ResponseEvents, compact
from services.requests.store.record import ResponseRecord
from services.requests.text.answers.translate import Fold, Json
from services.requests.workers.grammars.answers import NOT_CHECKED
from shared.process.errors import Rejected
from shared.wire.messages import RequestError, TokenEvent
from shared.wire.transport import Backoff

MAX_KEPT = 32 << 20  # bytes of responses that have ended
MAX_WHOLE = 16 << 20  # of one response: of a longer one each follower holds only what he has not been sent
MAX_HELD = 512 << 20  # of all that are followed
MAX_HELD_OF_ONE = 128 << 20  # of a tenant's
PIECE = 64 << 10  # that a follower is given at a time
EVENT_BYTES = 64  # that an event takes in addition to its own
WAITING_BYTES = 1024  # that one takes which is not encoded yet
ASKED_BYTES = 4  # that a byte of what was asked takes, as values
TOKEN_BYTES = 256  # that a token takes until the response is over, in addition to its logprobs


class ReplayedResponse:
    """The events so far. An event's number is its place."""

    def __init__(self, record: ResponseRecord, asked: Json, turn: asyncio.Lock, *, first: int | None = None) -> None:
        """turn: is held while its events are made; first: the first event that its only reader
        wants; None: it holds all of them, for all readers.
        """
        self.record = record
        self.asked = asked
        self._num_asked_bytes = ASKED_BYTES * len(compact(asked))
        self.turn = turn
        self.is_whole = first is None
        self.is_given_up = False  # it has become too long to be held whole
        self.num_followers = 0
        self.has_caught_up = False  # there was no more in the log
        self.interruption: RequestError | None = None  # why no more will come, though it has no end
        self.failure: Exception | None = None
        self.reading: asyncio.Task[None] | None = None  # of the log's next page
        self.backoff = Backoff()
        self.position, self.last_id = 0, b"0-0"
        self.began_at = self.heard_at = time.monotonic()
        self.is_over = self.is_worth_keeping = False
        self._first = first or 0
        self._encoded: list[bytes] = []  # all of them; of one that is not whole, those that its reader is being sent
        self._num_encoded_bytes = 0
        self._waiting: deque[Json] = deque()  # of one that is not whole
        self._events = ResponseEvents(record, asked, after=self._first - 1)
        self._fold: Fold | None = Fold(record, self._events)
        self._body = b""
        self._take(self._events.opening(None))

    @property
    def size(self) -> int:
        """The bytes of memory that it takes."""
        growing = (
            self._fold.choice.num_output_tokens * TOKEN_BYTES + self._events.num_logprob_bytes
            if self._fold is not None
            else 0
        )
        held = self._num_encoded_bytes + len(self._waiting) * WAITING_BYTES + len(self._body)
        return held + growing + self._num_asked_bytes

    @property
    def fold(self) -> Fold:
        """While it is not over."""
        assert self._fold is not None
        return self._fold

    def add(self, event: TokenEvent) -> None:
        self._take(self.fold.add(event))
        if self.fold.is_over:
            choice, self.is_over = self.fold.choice, True
            # whether it will always be the same: another check may find out more, a log that was lost may come back
            self.is_worth_keeping = choice.finish_reason != "error" and not any(
                each["message"].startswith(NOT_CHECKED) for each in choice.schema_errors
            )

    def _take(self, events: list[Json]) -> None:
        if self.is_whole:
            self._hold([self._events.encode(event) for event in events])
        else:
            self._waiting += [event for event in events if event["sequence_number"] >= self._first]

    def _hold(self, encoded: list[bytes]) -> None:
        self._encoded += encoded
        self._num_encoded_bytes += sum(map(len, encoded)) + EVENT_BYTES * len(encoded)

    def piece(self, place: int) -> list[bytes]:
        """Some of the events from this place on: one, or several that are short. Of one that is not
        whole, those that come next.
        """
        if not self.is_whole:
            self._encode_next()
            return self._encoded
        size, end = 0, place
        while end < len(self._encoded) and (end == place or size + len(self._encoded[end]) <= PIECE):
            size += len(self._encoded[end])
            end += 1
        return self._encoded[place:end]

    def _encode_next(self) -> None:
        self._encoded, self._num_encoded_bytes = [], 0
        while (
            self._waiting
            and self._num_encoded_bytes < PIECE
            and (not self._encoded or self._waiting[0]["type"].endswith(".delta"))
        ):
            self._hold([self._events.encode(self._waiting.popleft())])

    def drop_events(self) -> None:
        """Nobody reads those so far."""
        self.is_whole = False
        self._encoded, self._num_encoded_bytes = [], 0
        self._waiting.clear()

    def give_up(self) -> None:
        """It is too long for all its followers to share."""
        self.is_given_up = True
        self.drop_events()
        self.drop_fold()

    def drop_fold(self) -> None:
        """Drop what made the events: there will be no more."""
        self._fold, self._events = None, ResponseEvents(self.record, {})

    def body(self) -> bytes:
        """The response as it is now."""
        if self._body:
            return self._body
        found = compact(self._events.whole())
        if self.is_over:
            self._body, self.asked, self._num_asked_bytes = found, {}, 0
            self.drop_fold()
        return found

    def interrupted(self, error: RequestError) -> bytes:
        return self.fold.encode(self._events.interrupted(error))


class Replays:
    """The replays that are followed now, and of those that have ended the last used."""

    def __init__(self) -> None:
        self.followed: dict[ReplayedResponse, None] = {}
        self._shared: dict[str, ReplayedResponse] = {}  # of those, by response, the ones that are held whole
        self._kept: OrderedDict[str, tuple[ReplayedResponse, asyncio.TimerHandle]] = OrderedDict()
        # by tenant: the events of one replay at a time are made
        self._turns: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def make(self, record: ResponseRecord, asked: Json, *, first: int | None = None) -> ReplayedResponse:
        return ReplayedResponse(record, asked, self._turns.setdefault(record.tenant_id, asyncio.Lock()), first=first)

    def get(self, response_id: str) -> ReplayedResponse | None:
        """One that has ended, or is followed."""
        if response_id in self._kept:
            self._kept.move_to_end(response_id)
            return self._kept[response_id][0]
        return self._shared.get(response_id)

    def held(self, tenant_id: str | None = None) -> int:
        """The bytes of a tenant's that are followed; None: of all."""
        return sum(each.size for each in self.followed if tenant_id in (None, each.record.tenant_id))

    def check_room(self, record: ResponseRecord) -> None:
        """Raises Rejected (429, 503) if another follower of the response would be too much."""
        if self.get(record.response_id) is not None:
            return
        if self.held(record.tenant_id) >= MAX_HELD_OF_ONE:
            message = "too many long responses of this key are followed at this gateway"
            raise Rejected(message, status=429, retry_after_s=1, code="too_many_streams")
        if self.held() >= MAX_HELD:
            raise Rejected(
                "too many long responses are followed at this gateway",
                status=503,
                retry_after_s=1,
                code="too_many_streams",
            )

    def may_grow(self, replay: ReplayedResponse) -> bool:
        """A tenant's oldest always may, however long it is."""
        oldest = min(
            (each for each in self.followed if each.record.tenant_id == replay.record.tenant_id),
            key=lambda each: each.began_at,
        )
        return replay is oldest or (self.held(replay.record.tenant_id) < MAX_HELD_OF_ONE and self.held() < MAX_HELD)

    def join(self, record: ResponseRecord, asked: Json) -> ReplayedResponse:
        """Follow the response with all others who do."""
        replay = self.get(record.response_id)
        if replay is None:
            replay = self._shared[record.response_id] = self.make(record, asked)
        return self._enter(replay)

    def go_on(self, replay: ReplayedResponse, place: int) -> ReplayedResponse:
        """Leave one that has become too long, and follow the response alone."""
        alone = self._enter(self.make(replay.record, replay.asked, first=place))
        alone.began_at = replay.began_at
        self.leave(replay)
        return alone

    def _enter(self, replay: ReplayedResponse) -> ReplayedResponse:
        replay.num_followers += 1
        self.followed[replay] = None
        return replay

    def leave(self, replay: ReplayedResponse) -> None:
        replay.num_followers -= 1
        if not replay.num_followers:
            self.share_no_more(replay)
            del self.followed[replay]
            if replay.reading is not None:
                replay.reading.cancel()

    def give_up(self, replay: ReplayedResponse) -> None:
        """Have each of its followers go on alone."""
        self.share_no_more(replay)
        replay.give_up()

    def share_no_more(self, replay: ReplayedResponse) -> None:
        """Let those who come now begin another."""
        if self._shared.get(replay.record.response_id) is replay:
            del self._shared[replay.record.response_id]

    def keep(self, replay: ReplayedResponse, seconds: float) -> None:
        """So long at most."""
        response_id = replay.record.response_id
        self.forget(response_id)
        self._kept[response_id] = replay, asyncio.get_running_loop().call_later(seconds, self.forget, response_id)
        while sum(each.size for each, _ in self._kept.values()) > MAX_KEPT:
            self.forget(next(iter(self._kept)))

    def forget(self, response_id: str) -> None:
        """One that has ended."""
        if (found := self._kept.pop(response_id, None)) is not None:
            found[1].cancel()
