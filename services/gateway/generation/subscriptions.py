"""One task reads this gateway's events stream and the control stream, and hands each event to its
response.

Events are the fast path, and nothing relies on them: a sequence without events is looked up in its log
(log_reader.py).
"""

import asyncio
import os
from collections import deque
from collections.abc import Coroutine
from typing import Any

import redis
import redis.asyncio

from services.gateway.generation.subscription import Subscription
from services.requests.errors import draining
from services.requests.store.client import OwnConnection, persist
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.process.errors import Invalid
from shared.process.telemetry import get_logger
from shared.wire.entries import TRIM_EVERY_S, entries_of, next_id, write_dead_letter
from shared.wire.line import DENIED, reason_of, without_command
from shared.wire.messages import Control, RequestError, StepEvents, TokenEvent, decode
from shared.wire.redis_clock import NEWEST_IDS, has_begun_again
from shared.wire.stage import Stage
from shared.wire.streams import CONTROL, END_EVENT, MESSAGE, events
from shared.wire.token_log import end_of
from shared.wire.transport import Backoff

log = get_logger("penstock.gateway")

BLOCK_MS = 1000
MAX_RECENT = 16
STALE_S = 5.0  # a reader that has not read for this long does not work

RESUMED_ELSEWHERE = RequestError("the response was resumed elsewhere", 409, code="resumed_elsewhere")


class Subscriptions:
    """The responses that clients read at this gateway, and the task that reads events for them."""

    def __init__(self, stage: Stage, client: "redis.asyncio.Redis", clock: Clock = SYSTEM_CLOCK) -> None:
        self.stage = stage
        self.client = client
        self.clock = clock
        self.stream = events(stage.replica_id)
        self.backoff = Backoff()
        self.behind: set[Subscription] = set()  # their logs are to be read, because events are missing
        self.read_logs = asyncio.Event()  # set: read them now
        self.recent: deque[Subscription] = deque(maxlen=MAX_RECENT)  # closed ones, for the live view
        self._by_request: dict[str, Subscription] = {}
        self._last_id = "0-0"
        self._control_id = ""  # of the last control message that was read; empty: not known yet
        self._connection = OwnConnection(client)  # for the reads
        # on its way to the dead letters
        self._garbage: deque[tuple[str, dict[bytes, bytes], Exception]] = deque(maxlen=1000)
        self._read_at = self.clock.monotonic()
        self._trimmed_at = 0.0

    @property
    def silent_s(self) -> float:
        """Seconds since the reader last had a reply from Redis."""
        return self.clock.monotonic() - self._read_at

    @property
    def problems(self) -> list[str]:
        """Why events do not come, in words; empty if they do."""
        problems = [f"events can't be read: {self.backoff.problem}"] if self.backoff.problem else []
        return problems + ([f"events have not been read for {self.silent_s:.0f} s"] if self.silent_s > STALE_S else [])

    @property
    def num_sequences(self) -> int:
        """The number of sequences that this gateway streams. Thread-safe."""
        return len(self._by_request)

    def all(self) -> set[Subscription]:
        return set(self._by_request.values())

    def subscribe(self, response_id: str, positions: dict[str, int], generation: int, model: str) -> Subscription:
        """Send the response's events to a new subscription. One of an older generation ends."""
        subscription = Subscription(response_id, positions, generation, model, self.clock)
        for request_id in positions:
            if (older := self._by_request.get(request_id)) is not None:
                self.hand_over(older)
            self._by_request[request_id] = subscription
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        subscription.close()
        self.recent.append(subscription)
        self.behind.discard(subscription)
        for request_id in subscription.positions:
            if self._by_request.get(request_id) is subscription:
                del self._by_request[request_id]

    def hand_over(self, subscription: Subscription) -> None:
        """End the subscription: another reader has the response now."""
        log.info("resumed elsewhere", response_id=subscription.response_id, generation=subscription.generation)
        subscription.fail(RESUMED_ELSEWHERE)

    def drain(self) -> None:
        """End every open response: its sequences go on, and another gateway can take it over."""
        if subscriptions := self.all():
            log.info("handing over what has not ended", num_responses=len(subscriptions))
        for subscription in subscriptions:
            subscription.fail(draining(subscription.response_id))

    def catch_up(self, subscription: Subscription) -> None:
        """Read the subscription's logs as soon as possible."""
        self.behind.add(subscription)
        self.read_logs.set()

    async def run(self) -> None:
        """Run until cancelled. Wait while Redis can't serve: events sent meanwhile stay in the
        stream."""
        try:
            while True:
                reply = await persist(self._read, self.backoff)
                self._read_at = self.clock.monotonic()
                self._take(entries_of(reply))
                self.stage.mark_alive()
        finally:
            await self._connection.close()

    def _take(self, entries: dict[bytes, list[tuple[bytes, dict[bytes, bytes]]]]) -> None:
        for entry_id, values in entries.get(self.stream.key.encode(), []):
            self._last_id = entry_id.decode()
            self._dispatch(values)
        for entry_id, values in entries.get(CONTROL.key.encode(), []):
            self._control_id = entry_id.decode()
            self._handle_control(values)

    async def _read(self) -> Any:
        """Wait for more. Every TRIM_EVERY_S, trim the dispatched entries, and move unreadable ones to the
        dead letters."""
        if not self._control_id:
            latest: Any = await self.client.xrevrange(CONTROL.key, count=1)
            self._control_id = latest[0][0].decode() if latest else "0-0"
        if self._garbage or self.clock.monotonic() - self._trimmed_at > TRIM_EVERY_S:
            await self._clean_up()
        streams = (self.stream.key, CONTROL.key, self._last_id, self._control_id)
        return await self._connection.ask("XREAD", "BLOCK", BLOCK_MS, "STREAMS", *streams)

    async def _clean_up(self) -> None:
        letters = list(self._garbage)
        async with self.client.pipeline(transaction=False) as pipe:
            pipe.xtrim(self.stream.key, minid=next_id(self._last_id), approximate=False)
            for key, values, error in letters:
                write_dead_letter(key, values, error, 1, pipe)
            NEWEST_IDS.call(pipe, [self.stream.key, CONTROL.key])
            *_, [newest_event, newest_control] = await pipe.execute()
        if has_begun_again(self._last_id, newest_event) or has_begun_again(self._control_id, newest_control):
            log.warning(
                "a stream has begun again: Redis' clock went back", events=self._last_id, control=self._control_id
            )
            self._last_id = "0-0" if has_begun_again(self._last_id, newest_event) else self._last_id
            self._control_id = "0-0" if has_begun_again(self._control_id, newest_control) else self._control_id
        self._trimmed_at = self.clock.monotonic()
        for _ in letters:
            self._garbage.popleft()

    def _dispatch(self, values: dict[bytes, bytes]) -> None:
        try:
            step = decode(StepEvents, values[MESSAGE])
        except (Invalid, KeyError) as error:
            self._garbage.append((self.stream.key, values, error))
            return
        for moments in step.moments:
            if (subscription := self._by_request.get(moments.request_id)) is not None:
                subscription.timelines[moments.request_id].note(moments)
        for payload in step.events:
            try:
                self._offer(decode(TokenEvent, payload))
            except Invalid as error:  # the step's other events are good
                self._garbage.append((self.stream.key, {MESSAGE: payload}, error))
        try:
            if (end := end_of(values)) is not None:
                self._offer(end)
        except Invalid as error:
            self._garbage.append((self.stream.key, {MESSAGE: values[END_EVENT]}, error))

    def _offer(self, event: TokenEvent) -> None:
        subscription = self._by_request.get(event.request_id)
        if subscription is not None and not subscription.offer(event):
            self.catch_up(subscription)

    def _handle_control(self, values: dict[bytes, bytes]) -> None:
        """Obey a message to all replicas: `attach` names a newer generation of readers. (Other stages
        report unreadable messages.)"""
        try:
            message = decode(Control, values[MESSAGE])
        except (Invalid, KeyError):
            return
        if message.action == "refresh":
            self.stage.refresh()
        if message.action == "attach":
            for request_id in message.request_ids:
                subscription = self._by_request.get(request_id)
                if subscription is not None and subscription.generation < message.generation:
                    self.hand_over(subscription)


async def exit_on_failure(name: str, work: Coroutine[Any, Any, None]) -> None:
    """Run a task without which the gateway gets no events. If it fails, the process ends, and its
    supervisor starts another."""
    try:
        await work
    except asyncio.CancelledError:
        raise
    except DENIED as error:
        log.error("Redis refuses, ending the process", error=reason_of(error))
        os._exit(1)
    except BaseException as error:
        log.exception(
            "a task that must not end failed, ending the process", task=name, error=repr(without_command(error))
        )
        os._exit(1)
