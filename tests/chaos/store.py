"""The run's own Redis: killed, stopped, cut and started again over the same folder, or replaced by its replica."""

import asyncio
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
import redis.asyncio

from services.operator.redis_server import find_binary, socket_path, start_server
from tests.chaos.clocks import Clocks
from tests.deployment import free_port

UP_TIMEOUT_S = 120.0
NAME = "redis"  # of its clock


@dataclass(slots=True)
class Store:
    """Owns the server's process. `lock` is held by a fault that has Redis in its hands."""

    folder: Path
    clocks: Clocks | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    process: "subprocess.Popen[bytes] | None" = None
    num_starts: int = 0
    has_limit: bool = False  # of its files' size

    @property
    def socket(self) -> Path:
        return socket_path(self.folder)

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def client(self) -> Any:
        """A new connection pool, for `async with`. Any: redis-py types each reply as all that it could be."""
        return redis.asyncio.Redis.from_url(self.url, socket_timeout=30, socket_connect_timeout=30)

    async def start(self) -> None:
        """Start the server and wait until it answers."""
        self.process = start_server(self.folder, binary=self.wrapper())
        self.num_starts += 1
        deadline = time.monotonic() + UP_TIMEOUT_S
        while not await self.answers():
            if time.monotonic() > deadline:
                raise RuntimeError(f"Redis does not answer:\n{self.log_tail()}")
            await asyncio.sleep(0.05)

    def wrapper(self) -> Path:
        """The server as a command that a full disk does not kill, and whose clock can be set. (A
        file beyond RLIMIT_FSIZE is SIGXFSZ, or EFBIG if ignored.)
        """
        path = self.folder.with_name("redis-server")
        if not path.exists():
            clock = self.clocks.environment(NAME) if self.clocks is not None else {}
            exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in clock.items())
            path.write_text(f"#!/bin/sh\ntrap '' XFSZ\n{exports}exec {shlex.quote(str(find_binary()))} \"$@\"\n")
            path.chmod(0o700)
        return path

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
        """Take up to num_bytes off the end of the append-only file, as a power cut does. Returns
        how many; the server must be dead.
        """
        files = sorted(
            (self.folder / "appendonlydir").glob("*.incr.aof"),
            key=lambda path: int(re.findall(r"\.(\d+)\.incr", path.name)[0]),
        )
        if not files:
            return 0
        size = files[-1].stat().st_size
        taken = min(num_bytes, size)
        with files[-1].open("r+b") as file:
            file.truncate(size - taken)
        return taken

    def limit_files(self, num_bytes: int) -> None:
        """No file of the server may become longer than its append-only file is now, by num_bytes;
        -1: as long as they like.
        """
        if self.process is None or self.process.poll() is not None:
            return
        size = max((path.stat().st_size for path in (self.folder / "appendonlydir").glob("*.aof")), default=0)
        soft = resource.RLIM_INFINITY if num_bytes < 0 else size + num_bytes
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (soft, resource.RLIM_INFINITY))
        self.has_limit = num_bytes >= 0

    async def promote_replica(self, lag_s: float) -> None:
        """A replica copies everything, loses its primary from sight, and takes its place lag_s
        later: what was written meanwhile is gone.
        """
        folder, port = self.folder.with_name("replica"), free_port()
        shutil.rmtree(folder, ignore_errors=True)
        async with self.client() as primary:
            await primary.config_set("port", port)
        process = start_server(folder, binary=self.wrapper())
        try:
            replica = Store(folder, process=process)
            await self._copied(replica, port)
            async with replica.client() as client:
                await client.execute_command("REPLICAOF", "127.0.0.1", 1)
                await asyncio.sleep(lag_s)
                self.kill()
                await client.execute_command("REPLICAOF", "NO", "ONE")
        except BaseException:
            process.kill()
            process.wait()
            raise
        shutil.rmtree(self.folder)
        os.rename(folder, self.folder)  # with its socket, which stays bound
        self.process = process
        self.num_starts += 1

    async def _copied(self, replica: "Store", port: int) -> None:
        deadline = time.monotonic() + UP_TIMEOUT_S
        while not await replica.answers():
            await asyncio.sleep(0.05)
        async with replica.client() as client:
            await client.execute_command("REPLICAOF", "127.0.0.1", port)
            while (await client.info("replication"))["master_link_status"] != "up":
                if time.monotonic() > deadline:
                    raise RuntimeError(f"the replica does not come up:\n{replica.log_tail()}")
                await asyncio.sleep(0.05)

    async def heal(self) -> None:
        """Undo whatever a fault may have left: a server that runs, is a primary, and takes writes."""
        if self.process is None or self.process.poll() is not None:
            await self.start()
        self.signal(signal.SIGCONT)
        had_limit = self.has_limit
        if had_limit:
            self.limit_files(-1)
        deadline = time.monotonic() + UP_TIMEOUT_S
        while True:
            try:
                async with self.client() as client:
                    await client.execute_command("REPLICAOF", "NO", "ONE")
                    await client.config_set("min-replicas-to-write", 0)
                    await client.config_set("maxmemory", 0)
                    if had_limit:
                        await self._rewrite(client)
                return
            except (redis.RedisError, OSError):
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.1)

    async def _rewrite(self, client: Any) -> None:
        """Does as docs/operate/trouble.md wants after a full disk, for all gateways may be dead:
        until then a crash may cost the file.
        """
        await self._until(client, {"aof_last_write_status": "ok"})
        with suppress(redis.ResponseError):  # a gateway has begun it
            await client.bgrewriteaof()
        await self._until(client, {"aof_rewrite_in_progress": 0, "aof_rewrite_scheduled": 0})

    async def _until(self, client: Any, wanted: dict[str, Any]) -> None:
        """Wait until Redis says this of its append-only file."""
        deadline = time.monotonic() + UP_TIMEOUT_S
        while not wanted.items() <= (await client.info("persistence")).items():
            if time.monotonic() > deadline:
                raise RuntimeError(f"the append-only file is not written:\n{self.log_tail()}")
            await asyncio.sleep(0.05)

    def log_tail(self) -> str:
        path = self.folder / "redis.log"
        return path.read_text(errors="replace")[-2000:] if path.exists() else ""
