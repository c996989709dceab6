"""SequenceSlots: how many sequences of batches this worker may have in the pipeline at once, and the
requests whose ends are waited for.

The requests in a model's pipeline are a hash in Redis (requests/store/admission), and the stage that
ends a request removes it there. So one look at that hash for all requests at once says which of them
have ended, and how many requests there are that are no batch's, for which the batches make room.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import redis.asyncio

from services.requests.store.client import persist
from shared.process.clock import SYSTEM_CLOCK, Clock
from shared.wire.streams import inflight_key

LOOK_EVERY_S = 0.02
BUSY_S = 2.0  # for which a request of another client is remembered: the next one may follow


class SequenceSlots:
    """Counts the sequences of this worker's batches, and watches for the ends of their requests."""

    def __init__(
        self,
        client: "redis.asyncio.Redis",
        most: int,
        most_when_busy: int,
        of_other_workers: Callable[[], int],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """most, most_when_busy: sequences, alone and while other clients' requests run.

        of_other_workers: how many sequences other workers' batches had in the pipeline a moment ago.
        """
        self.client = client
        self.most = most
        self.most_when_busy = min(most, most_when_busy)
        self.of_other_workers = of_other_workers
        self.clock = clock
        self.num_taken = 0
        self._is_paused = False
        self._busy_until = 0.0
        self._waiting: dict[str, dict[str, asyncio.Future[None]]] = {}  # by model and request
        self._has_waiting = asyncio.Event()
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()

    @property
    def limit(self) -> int:
        if self._is_paused:
            return 0
        return self.most_when_busy if self.clock.monotonic() < self._busy_until else self.most

    async def acquire(self, count: int) -> None:
        """Wait for so many slots, in turn. A request for more than the limit gets them when all are free."""
        async with self._turn:
            while self.limit == 0 or (self.num_taken and self.num_taken + count > self.limit):
                self._changed.clear()
                await self._changed.wait()
            self.num_taken += count

    def release(self, count: int) -> None:
        self.num_taken -= count
        self._changed.set()

    def pause(self, is_paused: bool) -> None:
        """While Redis is nearly full, the requests in the pipeline end and none is added."""
        self._is_paused = is_paused
        self._changed.set()

    async def ended(self, model: str, request_ids: list[str]) -> None:
        """Wait until none of the requests is in the model's pipeline any more."""
        waiting = self._waiting.setdefault(model, {})
        futures = [
            waiting.setdefault(request_id, asyncio.get_running_loop().create_future()) for request_id in request_ids
        ]
        self._has_waiting.set()
        try:
            await asyncio.gather(*futures)
        finally:
            for request_id in request_ids:
                waiting.pop(request_id, None)

    async def look(self) -> None:
        """Look again and again as long as an end is waited for; until cancelled."""
        while True:
            if not any(self._waiting.values()):
                self._has_waiting.clear()
                self._changed.set()
                await self._has_waiting.wait()
            for model in [model for model, waiting in self._waiting.items() if waiting]:
                await self._look_at(model)
            self._changed.set()  # limits change with time, too
            await asyncio.sleep(LOOK_EVERY_S)

    async def _look_at(self, model: str) -> None:
        waiting = self._waiting[model]
        names, num_taken = list(waiting), self.num_taken

        async def ask() -> Any:
            async with self.client.pipeline(transaction=False) as pipe:
                pipe.hmget(inflight_key(model), names)
                pipe.hlen(inflight_key(model))
                return await pipe.execute()

        held, num_in_flight = await persist(ask)
        for name, value in zip(names, held, strict=True):
            if value is None and name in waiting and not waiting[name].done():
                waiting[name].set_result(None)
        # some may have begun or ended since Redis counted
        if num_in_flight - 1 > max(num_taken, self.num_taken) + self.of_other_workers():
            self._busy_until = self.clock.monotonic() + BUSY_S
