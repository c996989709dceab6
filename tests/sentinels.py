"""A primary with two replicas, and three Sentinels that name it: real servers, which can be killed."""

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import redis

from services.operator.redis_server import find_binary
from tests.deployment import free_port
from tests.waiting import wait_until

SERVICE = "penstock"
CONFIGURATION = """
port {port}
dir {folder}
sentinel monitor {service} 127.0.0.1 {primary} 2
sentinel down-after-milliseconds {service} 1000
sentinel failover-timeout {service} 4000
"""


@dataclass
class Guarded:
    """The servers, by port."""

    folder: Path
    binary: Path
    servers: "dict[int, subprocess.Popen[bytes]]" = field(default_factory=dict)
    sentinels: "dict[int, subprocess.Popen[bytes]]" = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(f'127.0.0.1:{port}' for port in self.sentinels)}/{SERVICE}/0"

    def start(self) -> None:
        primary, *replicas = [free_port() for _ in range(3)]
        self.start_server(primary)
        for port in replicas:
            self.start_server(port, primary)
        wait_until(
            lambda: self.num_replicas(primary) == 2, description="the primary has two replicas"
        )  # Sentinels look for more every 10 s only
        for port in [free_port() for _ in range(3)]:
            file = self.folder / f"sentinel-{port}.conf"
            file.write_text(CONFIGURATION.format(port=port, folder=self.folder, service=SERVICE, primary=primary))
            self.sentinels[port] = self._run(str(file), "--sentinel", "--logfile", str(file.with_suffix(".log")))
        wait_until(self.is_whole, description="the Sentinels know two replicas and each other")

    def start_server(self, port: int, primary: int | None = None) -> None:
        """Start a server, or start it again with its data."""
        folder = self.folder / str(port)
        folder.mkdir(exist_ok=True)
        options = {
            "port": port,
            "bind": "127.0.0.1",
            "dir": folder,
            "appendonly": "yes",
            "save": "",
            "logfile": folder / "log",
            "repl-diskless-sync-delay": 0,
        }
        own = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        self.servers[port] = self._run(
            *own, *(["--replicaof", "127.0.0.1", str(primary)] if primary is not None else [])
        )

    def is_whole(self) -> bool:
        with suppress(redis.RedisError):
            for port in self.sentinels:
                with redis.Redis(port=port) as client:
                    state = client.sentinel_master(SERVICE)
                    if state["num-slaves"] < 2 or state["num-other-sentinels"] < 2 or not state["is_master"]:
                        return False
            return self.num_replicas(self.primary()) == 2
        return False

    def num_replicas(self, port: int) -> int:
        """That follow the server at the port."""
        with suppress(redis.ConnectionError), redis.Redis(port=port) as client:
            return sum(
                each["state"] == "online"
                for name, each in client.info("replication").items()
                if name.startswith("slave")
            )
        return 0

    def primary(self) -> int:
        """The port of the primary, as the Sentinels say."""
        with redis.Redis(port=next(iter(self.sentinels))) as client:
            return int(client.sentinel_get_master_addr_by_name(SERVICE)[1])

    def signal_replicas(self, number: signal.Signals) -> None:
        primary = self.primary()
        for port, process in self.servers.items():
            if port != primary:
                process.send_signal(number)

    def kill_primary(self) -> int:
        """SIGKILL. Returns the port, where it can be started again."""
        port = self.primary()
        self.servers[port].kill()
        self.servers.pop(port).wait()
        return port

    async def fail_over(self, lag_s: float) -> None:
        """Kill the primary when its replicas have stood still for so long: another takes its place,
        and the old one follows it.
        """
        self.signal_replicas(signal.SIGSTOP)
        await asyncio.sleep(lag_s)
        died = self.kill_primary()
        self.signal_replicas(signal.SIGCONT)
        await asyncio.to_thread(wait_until, lambda: self.primary() != died, description="another is the primary")
        self.start_server(died)  # which believes to be the primary until it is told otherwise

    def stop(self) -> None:
        for process in (*self.sentinels.values(), *self.servers.values()):
            process.kill()
            process.wait()

    def _run(self, *arguments: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([str(self.binary), *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@contextmanager
def running_sentinels(folder: Path, binary: Path | None) -> Iterator[Guarded]:
    folder.mkdir(parents=True)
    guarded = Guarded(folder, binary or find_binary())
    try:
        guarded.start()
        yield guarded
    finally:
        guarded.stop()
