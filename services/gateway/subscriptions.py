"""This replica's events stream, turned into one queue per response.

Events may come twice (a step answered by two samplers) or not at all (sent to a gateway that died, before a client resumed here): a
position tells. One that was seen is dropped; where some are missing, the token log has them.
"""

import asyncio
import random
from collections import deque
from typing import Any

import redis
import redis.asyncio

from shared.errors import Invalid
from shared.messages import StepEvents, TokenEvent, decode
from shared.stage import Stage
from shared.streams import MESSAGE, events, log_key
from shared.telemetry import get_logger
from shared.transport import FIRST_RETRY_S, LONGEST_RETRY_S, entries_of, next_id, write_dead_letter

log = get_logger("penstock.gateway")

BLOCK_MS = 1000


def wake(waiter: "asyncio.Future[None] | None") -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


class Subscription:
    """The events of one response: of the sequences with these request ids, each from its position on."""

    def __init__(self, client: "redis.asyncio.Redis", positions: dict[str, int]) -> None:
        self._client = client
        self.positions = positions  # by request id: the last one handed out
        self.unfinished = set(positions)
        self._queue: deque[TokenEvent] = deque()  # bounded by the requests' max_tokens
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: TokenEvent) -> None:
        self._queue.append(event)
        wake(self._waiter)

    async def replay(self) -> None:
        """Queue what the logs hold already."""
        for request_id in list(self.unfinished):
            for event in await self._read_log(request_id):
                self.put(event)

    async def next(self, timeout_s: float) -> list[TokenEvent]:
        """The events that have come, in order, without gaps and without repetition; none after timeout_s.

        One future and one timer a wait, no task: this runs for every stream at every step.
        """
        if not self._queue:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            timer = loop.call_later(timeout_s, wake, self._waiter)
            try:
                await self._waiter
            finally:
                timer.cancel()
                self._waiter = None
        accepted: list[TokenEvent] = []
        while self._queue:
            event = self._queue.popleft()
            is_gap = event.token_id is not None and event.position > self.positions[event.request_id] + 1
            accepted += [each for each in (await self._read_log(event.request_id) if is_gap else [event]) if self._accept(each)]
        return accepted

    def _accept(self, event: TokenEvent) -> bool:
        if event.request_id not in self.unfinished:
            return False
        is_new = event.position > self.positions[event.request_id]
        if not is_new and (event.token_id is not None or event.finish_reason is None):
            return False
        self.positions[event.request_id] = max(event.position, self.positions[event.request_id])
        if event.finish_reason is not None:
            self.unfinished.discard(event.request_id)
        return True

    async def _read_log(self, request_id: str) -> list[TokenEvent]:
        after = self.positions[request_id]
        entries: Any = await self._client.xrange(log_key(request_id), min=f"({after}-0" if after else "-")
        return [decode(TokenEvent, values[MESSAGE]) for _, values in entries]


class Subscriptions:
    """Reads the events stream of this gateway and hands each event to its response."""

    def __init__(self, stage: Stage, client: "redis.asyncio.Redis") -> None:
        self.stage = stage
        self.client = client
        self.stream = events(stage.replica_id)
        self._by_request: dict[str, Subscription] = {}
        self._last_id = "0-0"

    def subscribe(self, positions: dict[str, int]) -> Subscription:
        subscription = Subscription(self.client, positions)
        for request_id in positions:
            self._by_request[request_id] = subscription
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        for request_id in subscription.positions:
            if self._by_request.get(request_id) is subscription:
                del self._by_request[request_id]

    async def run(self) -> None:
        """Until cancelled. While Redis is away, wait for it; what was sent meanwhile is still in the stream."""
        delay_s = FIRST_RETRY_S
        while True:
            try:
                reply = await self._read()
                delay_s = FIRST_RETRY_S
            except redis.ConnectionError as error:
                log.warning("redis is away, trying again", retry_in_s=round(delay_s, 2), error=error)
                await asyncio.sleep(delay_s * random.uniform(0.5, 1.0))
                delay_s = min(delay_s * 2, LONGEST_RETRY_S)
                continue
            for entry_id, values in entries_of(reply).get(self.stream.key.encode(), []):
                self._last_id = entry_id.decode()
                await self._dispatch(values)
            self.stage.turn()

    async def _read(self) -> Any:
        """Trim what was dispatched, then wait for more; one round trip."""
        async with self.client.pipeline(transaction=False) as pipe:
            pipe.xtrim(self.stream.key, minid=next_id(self._last_id), approximate=False)
            pipe.xread({self.stream.key: self._last_id}, block=BLOCK_MS)
            return (await pipe.execute())[-1]

    async def _dispatch(self, values: dict[bytes, bytes]) -> None:
        try:
            for payload in decode(StepEvents, values[MESSAGE]).events:
                event = decode(TokenEvent, payload)
                subscription = self._by_request.get(event.request_id)
                if subscription is not None:
                    subscription.put(event)
        except (Invalid, KeyError) as error:
            async with self.client.pipeline(transaction=False) as pipe:
                write_dead_letter(self.stream.key, values, error, 1, pipe)
                await pipe.execute()
