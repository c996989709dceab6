"""Cancellation, repeated until Redis has it: a sequence without a reader must not run on because Redis
was away for a moment."""

import asyncio
from collections.abc import Sequence

import redis
import redis.asyncio

from services.requests.store.client import persist
from shared.process.telemetry import get_logger
from shared.wire.messages import Control, encode
from shared.wire.script import load_script
from shared.wire.streams import CONTROL, LOG_TTL_S, reader_key, tombstone_key
from shared.wire.transport import Backoff

log = get_logger("penstock.gateway")

MAX_PENDING = 10_000  # responses that wait for Redis to come back; beyond, the oldest run to their ends
CHUNK = 64  # responses in a round trip
LAST_TRY_S = 2.0

CANCEL = load_script("cancel")


class Canceller:
    """Owns the responses that are to be cancelled; one task writes the cancellations."""

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self.client = client
        self.backoff = Backoff()
        self._pending: dict[
            tuple[str, int], tuple[str, ...]
        ] = {}  # request ids by response and generation of its reader
        self._wake = asyncio.Event()

    def cancel(self, response_id: str, request_ids: Sequence[str], generation: int) -> None:
        """Cancel these sequences soon, unless another reader has taken the response over. Returns at
        once."""
        log.info("cancelling", response_id=response_id, num_sequences=len(request_ids))
        if len(self._pending) >= MAX_PENDING:
            oldest = next(iter(self._pending))
            del self._pending[oldest]
            log.error("cancel queue full; response will run to completion", response_id=oldest[0])
        self._pending[response_id, generation] = tuple(request_ids)
        self._wake.set()

    async def run(self) -> None:
        """Write cancellations until this task is cancelled."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._pending:
                await persist(self._write, self.backoff)

    async def finish(self) -> None:
        """Try once more when the gateway ends, for LAST_TRY_S."""
        try:
            async with asyncio.timeout(LAST_TRY_S):
                while self._pending:
                    await self._write()
        except (redis.RedisError, OSError, TimeoutError) as error:
            log.error("could not cancel, these run to their ends", num_responses=len(self._pending), error=error)

    async def _write(self) -> None:
        written = list(self._pending.items())[:CHUNK]
        async with self.client.pipeline(transaction=False) as pipe:
            for (response_id, generation), request_ids in written:
                message = encode(Control("cancel", request_ids))
                keys = (reader_key(response_id), CONTROL.key, *map(tombstone_key, request_ids))
                CANCEL.call(pipe, keys, generation, message, LOG_TTL_S)
            await pipe.execute()
        for key, request_ids in written:
            if self._pending.get(key) == request_ids:
                del self._pending[key]
