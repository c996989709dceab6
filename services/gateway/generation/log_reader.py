"""A sequence that was silent for a while is read from its log, and so is one with a gap.

This one rule heals a lost event, a lost attach, an end written between two reads, a Redis that
restarted, and one that came back empty.
"""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import redis
import redis.asyncio

from services.gateway.generation.subscription import Subscription
from services.gateway.generation.subscriptions import Subscriptions
from services.requests.errors import GONE
from shared.process.errors import Lost
from shared.process.telemetry import get_logger
from shared.wire.messages import Control, RequestError, TokenEvent
from shared.wire.registry import broadcast
from shared.wire.streams import MESSAGE, log_key, reader_key, response_key
from shared.wire.token_log import END, decode_entry, end_request, parse_log
from shared.wire.transport import Backoff, is_temporary

log = get_logger("penstock.gateway")

PAGE = 512  # entries of a log at a time: decoding more would stall the other streams
CHUNK = 64  # sequences in a round trip, for the same reason


@dataclass(frozen=True, slots=True)
class LogSnapshot:
    """A sequence as Redis holds it."""

    events: list[TokenEvent]  # after the position; or the end, should the log have ended there or before
    has_log: bool
    has_record: bool
    is_whole_page: bool  # there may be more


class LogReader:
    """The task that reads the logs of silent sequences."""

    def __init__(self, subscriptions: Subscriptions, client: "redis.asyncio.Redis", interval_s: float) -> None:
        self.subscriptions = subscriptions
        self.client = client
        self.interval_s = interval_s
        self.backoff = Backoff()
        self._gone: list[tuple[str, str]] = []  # models and requests whose ends are to be written

    async def run(self) -> None:
        """Run until cancelled. Read sequences with a gap at once, and silent ones at every
        interval."""
        subscriptions, clock = self.subscriptions, self.subscriptions.clock
        looked_at = clock.monotonic()
        while True:
            try:
                async with asyncio.timeout(max(0.0, looked_at + self.interval_s - clock.monotonic())):
                    await subscriptions.read_logs.wait()
            except TimeoutError:
                looked_at = clock.monotonic()
            subscriptions.read_logs.clear()
            behind, subscriptions.behind = subscriptions.behind, set()
            try:
                await self._catch_up(list(self._due(behind)), behind)
            except (redis.RedisError, OSError) as error:
                if not is_temporary(error):
                    raise
                await asyncio.sleep(self.backoff.failed(error))
                for subscription in behind & subscriptions.all():
                    subscriptions.catch_up(subscription)
            else:
                self.backoff.succeeded()

    def _due(self, behind: set[Subscription]) -> Iterator[tuple[Subscription, str]]:
        """The sequences to read: those that are behind or silent."""
        silent_since = self.subscriptions.clock.monotonic() - self.interval_s
        for subscription in self.subscriptions.all():
            if subscription.has_failed or not subscription.is_submitted:
                continue
            for request_id in subscription.unfinished:
                if subscription in behind or subscription.heard_at[request_id] < silent_since:
                    yield subscription, request_id

    async def _catch_up(self, due: list[tuple[Subscription, str]], behind: set[Subscription]) -> None:
        unheard = set()
        for start in range(0, len(due), CHUNK):
            chunk = due[start : start + CHUNK]
            # events may come while we wait for the replies
            positions = [subscription.positions[request_id] for subscription, request_id in chunk]
            replies = await self._ask(chunk)
            for number, (subscription, request_id) in enumerate(chunk):
                if int(replies[4 * number + 3] or 0) > subscription.generation:  # before its log is decoded
                    self.subscriptions.hand_over(subscription)
                    continue
                await asyncio.sleep(0)  # others have their turn in between
                try:
                    snapshot = read(replies[4 * number : 4 * number + 3], positions[number])
                except Lost as error:
                    log.error("a token log is not whole", request_id=request_id, error=error)
                    subscription.fail(RequestError(f"the request was lost: {error}", 500, code="request_lost"))
                    continue
                if self._settle(subscription, request_id, snapshot) and subscription not in behind:
                    unheard.add(subscription)
        for subscription in unheard:
            await self._attach_again(subscription)
        if self._gone:
            await self._end_gone()

    async def _end_gone(self) -> None:
        """Write the ends of what is gone: should it still be computed somewhere, it ends there
        too."""
        async with self.client.pipeline(transaction=False) as pipe:
            for model, request_id in self._gone:
                end_request(pipe, model, request_id, None, error=GONE)
            await pipe.execute()
        self._gone.clear()

    async def _ask(self, chunk: list[tuple[Subscription, str]]) -> list[Any]:
        async with self.client.pipeline(transaction=False) as pipe:
            for subscription, request_id in chunk:
                position = subscription.positions[request_id]
                pipe.xrange(log_key(request_id), min=f"({position}-0" if position else "-", count=PAGE)
                pipe.xrevrange(log_key(request_id), count=1)
                pipe.exists(response_key(subscription.response_id))
                pipe.hget(reader_key(subscription.response_id), "generation")
            replies: list[Any] = await pipe.execute()
            return replies

    def _settle(self, subscription: Subscription, request_id: str, found: LogSnapshot) -> bool:
        """Hand on what the log has, or end the response. True: the log had something that no event
        had brought."""
        if not found.has_record and not found.events:  # if its compute dies, no other one knows of it
            log.error("the request is gone from Redis", request_id=request_id)
            self._gone += [(subscription.model, each) for each in sorted(subscription.unfinished)]
            subscription.fail(GONE)
            return False
        before = subscription.positions[request_id], request_id in subscription.unfinished
        for event in found.events:
            subscription.offer(event)
        subscription.heard_at[request_id] = self.subscriptions.clock.monotonic()
        if found.is_whole_page:
            self.subscriptions.catch_up(subscription)
        return before != (subscription.positions[request_id], request_id in subscription.unfinished)

    async def _attach_again(self, subscription: Subscription) -> None:
        """Tell the sampler again where to send the events."""
        log.info("events did not come, attaching again", response_id=subscription.response_id)
        message = Control(
            "attach", tuple(subscription.positions), self.subscriptions.stage.replica_id, subscription.generation
        )
        async with self.client.pipeline(transaction=False) as pipe:
            broadcast(pipe, message)
            await pipe.execute()


def read(replies: list[Any], position: int) -> LogSnapshot:
    """The replies about one sequence's log. Raises Lost for a log with a gap."""
    entries, last, has_record = replies
    events = parse_log(entries, position)
    if not events and last and END in last[0][1]:
        events = [decode_entry(last[0][0], last[0][1][MESSAGE])]  # its token is compared with the one that was taken
    return LogSnapshot(events, bool(last), bool(has_record), len(entries) == PAGE)
