"""How full Redis is. Near its memory limit new requests are refused, so that those that run find
the room to end."""

import asyncio
from typing import Any

import redis.asyncio

from services.requests.store.client import persist
from shared.process.host_memory import size_text
from shared.process.telemetry import get_logger
from shared.wire.redis_memory import NEARLY_FULL, Memory, memory_of
from shared.wire.transport import Backoff

log = get_logger("penstock.gateway")

LOOK_EVERY_S = 1.0


class RedisMemory:
    """Redis' memory as it was last read."""

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self.client = client
        self.memory = Memory(0, 0)
        self.backoff = Backoff()

    @property
    def is_nearly_full(self) -> bool:
        return self.memory.share >= NEARLY_FULL

    @property
    def problem(self) -> str:
        """The problem in words. Empty: there is room."""
        if not self.is_nearly_full:
            return ""
        return (
            f"redis is nearly full: {size_text(self.memory.used)} of {size_text(self.memory.limit)} are used, so no "
            "new requests are taken"
        )

    async def run(self) -> None:
        """Read it now and then, until cancelled."""
        while True:
            info: dict[str, Any] = await persist(lambda: self.client.info("memory"), self.backoff)
            was_full, self.memory = self.is_nearly_full, memory_of(info)
            if self.is_nearly_full != was_full:
                log.warning(
                    "redis is nearly full, refusing new requests" if not was_full else "redis has room again",
                    used=self.memory.used,
                )
            await asyncio.sleep(LOOK_EVERY_S)
