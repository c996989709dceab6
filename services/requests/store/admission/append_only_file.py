"""Redis' append-only file, written again from memory after Redis could not write it.

Redis 7 and Valkey open the file that follows a rewrite without O_APPEND (src/aof.c,
openNewIncrAofForAppend). When a disk is full, they cut off a partial write, but the next write begins
where that part had ended. The file then has a hole of zeros, and a server that starts later refuses
it: everything after the hole would be lost, even if it was acknowledged. Memory has everything. So
once Redis can write again, a gateway has it rewrite the file.
"""

import asyncio
from typing import Any

import redis.asyncio
from redis.exceptions import NoPermissionError

from services.requests.store.client import persist
from shared.process.telemetry import get_logger
from shared.wire.transport import Backoff

log = get_logger("penstock.gateway")

LOOK_EVERY_S = 0.5  # Redis tries again every second


class AppendOnlyFile:
    """Watches whether Redis can write its file, and has it rewritten."""

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        self.client = client
        self.is_rewrite_due = False
        self.backoff = Backoff()

    async def run(self) -> None:
        """Look at it now and then, until cancelled."""
        while True:
            await persist(self.look, self.backoff)
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        """One look. Asks for a rewrite once the file can be written again. Raises RedisError, OSError."""
        info: dict[str, Any] = await self.client.info("persistence")
        if info.get("aof_last_write_status", "ok") != "ok":
            self.is_rewrite_due = True
        elif self.is_rewrite_due and not info.get("aof_rewrite_in_progress"):
            await self.rewrite()
            self.is_rewrite_due = False

    async def rewrite(self) -> None:
        try:
            await self.client.bgrewriteaof()
        except NoPermissionError as error:
            log.error(
                "Redis could not write its append-only file: run BGREWRITEAOF before it restarts", reason=str(error)
            )
        except redis.ResponseError as error:
            log.info("another gateway has the append-only file rewritten", reason=str(error))
        else:
            log.warning("Redis could not write its append-only file for a while: it now makes a new one from memory")
