"""Jobs: the gateway's end of Celery's queue."""

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from redis.exceptions import RedisError

from shared.process.telemetry import get_logger
from shared.wire.job_queue import make_queue, send_batch
from shared.wire.transport import connect

if TYPE_CHECKING:
    from celery import Celery

log = get_logger("penstock.gateway")

SEND_TIMEOUT_S = 5.0


class Jobs:
    """Made by the first batch: until then a gateway does without Celery's modules."""

    def __init__(self, redis_url: str) -> None:
        self.redis_url = redis_url
        self._queue: Celery | None = None
        self._client: Any = None
        self._lock = asyncio.Lock()

    async def send(self, batch_id: str) -> None:
        """Have a worker look at the batch now. Should that fail, the workers find it by themselves
        a little later."""
        with suppress(TimeoutError):
            async with asyncio.timeout(SEND_TIMEOUT_S), self._lock:
                await asyncio.to_thread(self._send, batch_id)

    def _send(self, batch_id: str) -> None:
        from kombu.exceptions import OperationalError

        if self._queue is None:
            self._queue, self._client = make_queue(self.redis_url), connect(self.redis_url)
        try:
            send_batch(self._queue, self._client, batch_id)
        except (OperationalError, RedisError, OSError) as error:
            log.warning("no task was sent for a batch, the workers will find it", batch_id=batch_id, error=error)
