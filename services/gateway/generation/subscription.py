"""Subscription: the events of one response, in order, without gaps and without repetition. Plain
data, no Redis.

Events may come twice (a step answered by two samplers), not at all (sent to a gateway that died),
or after a hole: a position tells. What was seen is dropped; what does not follow is refused, and
the caller reads the log.
"""

import asyncio
from array import array
from collections import deque

from services.gateway.telemetry.timeline import Timeline
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.wire.messages import RequestError, TokenEvent
from shared.wire.token_log import end_alone

OTHER_TOKENS = RequestError(
    "Redis has lost a part of this answer, and it was not computed again as it was: send the request again",
    500,
    code="request_lost",
)


class ResponseFailed(Exception):
    """The response ends here with this error, though its sequences may not have."""

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message)
        self.error = error


class Subscription:
    """The sequences of one response, each from its position on, for one reader. `generation`: how many
    times the response was taken over before this reader had it."""

    def __init__(
        self,
        response_id: str,
        positions: dict[str, int],
        generation: int,
        model: str = "",
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.response_id = response_id
        self.model = model
        self.clock = clock
        self.positions = positions  # by request id: of the last event that was taken
        self.generation = generation
        self.is_submitted = generation > 0  # from then on Redis must know of it
        self.unfinished = set(positions)
        # by request id, the tokens that were taken, and after which position: should Redis lose some,
        # they come again, and must be the same
        self._taken: dict[str, tuple[int, array[int]]] = {
            request_id: (position, array("q")) for request_id, position in positions.items()
        }
        self.heard_at = dict.fromkeys(positions, self.clock.monotonic())
        self.timelines = {request_id: Timeline() for request_id in positions}
        self._queue: deque[TokenEvent] = deque()  # bounded by the requests' max_tokens
        self._failure: RequestError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._wait_ends_at = 0.0  # the loop's time
        self._timer: asyncio.TimerHandle | None = None  # of this wait or of an earlier one; then it is set again

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    @property
    def goes_on_elsewhere(self) -> bool:
        """Whether another reader may come, or has come, for what is unfinished. Nobody can read on
        where tokens have become others."""
        return self._failure is not None and self._failure is not OTHER_TOKENS

    def offer(self, event: TokenEvent) -> bool:
        """Take the event if it is the next of its sequence. False: it is not, for something before
        it is missing."""
        request_id, position = event.request_id, self.positions[event.request_id]
        self.heard_at[request_id] = self.clock.monotonic()
        if request_id not in self.unfinished:
            return True
        if event.token_id is not None and event.position <= position:
            if self._is_other(event):
                self.fail(OTHER_TOKENS)
            if self.has_failed or event.finish_reason is None:
                return True  # seen
            event = end_alone(event)
        if event.position > position + (event.token_id is not None):
            return False
        self.positions[request_id] = max(event.position, position)
        if event.token_id is not None:
            self._taken[request_id][1].append(event.token_id)
        if event.finish_reason is not None:
            self.unfinished.discard(request_id)
        self._queue.append(event)
        self._wake()
        return True

    def _is_other(self, event: TokenEvent) -> bool:
        """Whether a token that was taken before is another now, or the last where others have followed:
        the replica that computed again what Redis had lost has another version or model."""
        since, tokens = self._taken[event.request_id]
        ends_before = event.finish_reason is not None and event.position < self.positions[event.request_id]
        return ends_before or (event.position > since and tokens[event.position - since - 1] != event.token_id)

    def fail(self, error: RequestError) -> None:
        """End the response with this error, after what was taken so far. The first error counts."""
        self._failure = self._failure or error
        self._wake()

    async def next(self, timeout_s: float) -> list[TokenEvent]:
        """The events that have come; none after timeout_s. Raises ResponseFailed.

        One future a wait, no task, and a timer now and then: this runs for every stream at every
        step.
        """
        if not self._queue and self._failure is None:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            self._wait_ends_at = loop.time() + timeout_s
            if self._timer is None:
                self._timer = loop.call_at(self._wait_ends_at, self._ring)
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._failure is not None and not self._queue:
            raise ResponseFailed(self._failure)
        events = list(self._queue)
        self._queue.clear()
        return events

    def close(self) -> None:
        """Nobody waits any more."""
        if self._timer is not None:
            self._timer.cancel()

    def _ring(self) -> None:
        """The time of an earlier wait is over, or that of this one."""
        self._timer = None
        if self._waiter is None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._wait_ends_at:
            self._timer = loop.call_at(self._wait_ends_at, self._ring)
        else:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
