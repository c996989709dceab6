"""The run's own Redis: killed, stopped, cut and started again over the same folder."""

import asyncio
import re
import signal
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
import redis.asyncio

from services.redis_server import socket_path, start_server

UP_TIMEOUT_S = 120.0


@dataclass(slots=True)
class Store:
    """Owns the server's process. `lock` is held by a fault that has Redis in its hands."""

    folder: Path
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    process: "subprocess.Popen[bytes] | None" = None
    num_starts: int = 0

    @property
    def url(self) -> str:
        return f"unix://{socket_path(self.folder)}"

    def client(self) -> Any:
        """A new connection pool, for `async with`. Any: redis-py types each reply as all that it could be."""
        return redis.asyncio.Redis.from_url(self.url, socket_timeout=30, socket_connect_timeout=30)

    async def start(self) -> None:
        """Start the server and wait until it answers."""
        self.process = start_server(self.folder)
        self.num_starts += 1
        deadline = time.monotonic() + UP_TIMEOUT_S
        while not await self.answers():
            if time.monotonic() > deadline:
                raise RuntimeError(f"Redis does not answer:\n{self.log_tail()}")
            await asyncio.sleep(0.05)

    async def answers(self) -> bool:
        try:
            async with self.client() as client:
                return bool(await client.ping())
        except (redis.RedisError, OSError):
            return False

    def kill(self) -> None:
        """SIGKILL, and reaped."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def signal(self, number: signal.Signals) -> None:
        if self.process is not None:
            self.process.send_signal(number)

    def cut(self, num_bytes: int) -> int:
        """Take up to num_bytes off the end of the append-only file, as a power cut does. Returns how many; the server must be dead."""
        files = sorted((self.folder / "appendonlydir").glob("*.incr.aof"), key=lambda path: int(re.findall(r"\.(\d+)\.incr", path.name)[0]))
        if not files:
            return 0
        size = files[-1].stat().st_size
        taken = min(num_bytes, size)
        with files[-1].open("r+b") as file:
            file.truncate(size - taken)
        return taken

    async def heal(self) -> None:
        """Undo whatever a fault may have left: a server that runs, is a primary, and takes writes."""
        if self.process is None or self.process.poll() is not None:
            await self.start()
        self.signal(signal.SIGCONT)
        deadline = time.monotonic() + UP_TIMEOUT_S
        while True:
            try:
                async with self.client() as client:
                    await client.execute_command("REPLICAOF", "NO", "ONE")
                    await client.config_set("min-replicas-to-write", 0)
                    await client.config_set("maxmemory", 0)
                return
            except (redis.RedisError, OSError):
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.1)

    def log_tail(self) -> str:
        path = self.folder / "redis.log"
        return path.read_text(errors="replace")[-2000:] if path.exists() else ""
