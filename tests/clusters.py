"""A Redis Cluster of three primaries and three replicas: real servers, which can be killed, and
whose slots can be moved.
"""

import asyncio
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from services.operator.redis_server import find_binary
from tests.deployment import free_port
from tests.waiting import wait_until

NUM_PRIMARIES = 3
NODE_TIMEOUT_MS = 1000


@dataclass
class Clustered:
    """The servers, by port."""

    folder: Path
    binary: Path
    servers: "dict[int, subprocess.Popen[bytes]]" = field(default_factory=dict)
    bus_ports: dict[int, int] = field(default_factory=dict)

    def url(self, cell: str) -> str:
        return f"redis+cluster://{','.join(f'127.0.0.1:{port}' for port in self.servers)}/{cell}"

    def start(self) -> None:
        ports = [free_port() for _ in range(2 * NUM_PRIMARIES)]
        for port in ports:
            self.start_server(port)
        for port in ports:
            wait_until(lambda port=port: self.ask(port, "PING") is not None, description="the server answers")  # type: ignore[misc]
        for port in ports[1:]:
            self.ask(ports[0], "CLUSTER MEET", "127.0.0.1", port, self.bus_ports[port])
        wait_until(
            lambda: all(len(self.flags_at(port)) == len(ports) for port in ports),
            description="the nodes know each other",
        )
        share = REDIS_CLUSTER_HASH_SLOTS // NUM_PRIMARIES
        for index, port in enumerate(ports[:NUM_PRIMARIES]):
            last = REDIS_CLUSTER_HASH_SLOTS - 1 if index == NUM_PRIMARIES - 1 else (index + 1) * share - 1
            self.ask(port, "CLUSTER ADDSLOTSRANGE", index * share, last)
        for primary, replica in zip(ports[:NUM_PRIMARIES], ports[NUM_PRIMARIES:], strict=True):
            wait_until(
                lambda p=primary, r=replica: self.ask(r, "CLUSTER REPLICATE", self.id_of(p)) is not None,  # type: ignore[misc]
                description="a replica follows",
            )
        wait_until(self.is_whole, description="the cluster is whole")

    def start_server(self, port: int) -> None:
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
            "cluster-enabled": "yes",
            "cluster-node-timeout": NODE_TIMEOUT_MS,
            "cluster-replica-validity-factor": 0,
            "cluster-port": self.bus_ports.setdefault(port, free_port()),
        }
        arguments = [str(self.binary), *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
        self.servers[port] = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(self, port: int, *command: Any) -> Any:
        """The reply; None for an error."""
        with suppress(redis.RedisError), redis.Redis(port=port, socket_timeout=1, decode_responses=True) as client:
            return client.execute_command(*command)
        return None

    def flags_at(self, port: int) -> list[str]:
        """The flags of every node, as one of them sees it."""
        return [node["flags"] for node in (self.ask(port, "CLUSTER NODES") or {}).values()]

    def id_of(self, port: int) -> str:
        return str(self.ask(port, "CLUSTER MYID"))

    def is_whole(self) -> bool:
        """Whether every node sees all slots served, three primaries and three replicas, and every
        primary has its replica.
        """
        for port in self.servers:
            flags = self.flags_at(port)
            if len(flags) != 2 * NUM_PRIMARIES or any("fail" in each or "handshake" in each for each in flags):
                return False
            if (
                sum("master" in each for each in flags) != NUM_PRIMARIES
                or (self.ask(port, "CLUSTER INFO") or {}).get("cluster_state") != "ok"
            ):
                return False
        return all(len(self.ask(port, "ROLE")[2]) == 1 for port in self.servers if self.is_primary(port))

    def is_primary(self, port: int) -> bool:
        return bool((self.ask(port, "ROLE") or [""])[0] == "master")

    def primary_of(self, cell: str) -> int:
        """The port of the server that has the cell's slot, as most nodes say; 0 while none has."""
        slot, found = key_slot(f"{{{cell}}}".encode()), list[int]()
        for port in self.servers:
            with suppress(redis.RedisError), redis.Redis(port=port, socket_timeout=1) as client:
                found += [
                    int(node[1])
                    for first, last, node, *_ in client.execute_command("CLUSTER SLOTS")
                    if first <= slot <= last
                ]
        return max(set(found), key=found.count, default=0)

    async def fail_over(self, cell: str, lag_s: float) -> None:
        """Kill the cell's primary when the replicas have stood still for so long: another takes its
        place, and the old one follows it.
        """
        died = self.primary_of(cell)
        replicas = [process for port, process in self.servers.items() if not self.is_primary(port)]
        for process in replicas:
            process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(min(lag_s, 0.8 * NODE_TIMEOUT_MS / 1000))  # beyond the timeout, others take them for dead
        self.servers[died].kill()
        self.servers.pop(died).wait()
        for process in replicas:
            process.send_signal(signal.SIGCONT)
        await asyncio.to_thread(
            wait_until, lambda: self.primary_of(cell) not in (0, died), description="another is the primary"
        )
        self.start_server(died)

    def move(self, cell: str) -> None:
        """Move the cell's slot to another primary, in one go (CLUSTER MIGRATESLOTS)."""
        slot, begin = key_slot(f"{{{cell}}}".encode()), self.primary_of(cell)
        target = next(port for port in self.servers if port != begin and self.is_primary(port))
        assert self.ask(begin, "CLUSTER MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", self.id_of(target)) is not None
        wait_until(lambda: self.primary_of(cell) == target, description="the slot has moved")

    def move_by_key(self, cell: str) -> None:
        """Move it key by key, as servers without MIGRATESLOTS do: meanwhile a part of the keys is
        here, and a part there.
        """
        slot, begin = key_slot(f"{{{cell}}}".encode()), self.primary_of(cell)
        target = next(port for port in self.servers if port != begin and self.is_primary(port))
        ids = {port: self.id_of(port) for port in (begin, target)}
        self.ask(target, "CLUSTER SETSLOT", slot, "IMPORTING", ids[begin])
        self.ask(begin, "CLUSTER SETSLOT", slot, "MIGRATING", ids[target])
        with redis.Redis(port=begin) as client:
            while keys := client.execute_command("CLUSTER GETKEYSINSLOT", slot, 10):
                client.execute_command("MIGRATE", "127.0.0.1", target, "", 0, 5000, "KEYS", *keys)
        for port in (target, begin, *(each for each in self.servers if each not in ids and self.is_primary(each))):
            self.ask(port, "CLUSTER SETSLOT", slot, "NODE", ids[target])
        wait_until(lambda: self.primary_of(cell) == target, description="the slot has moved")

    def stop(self) -> None:
        for process in self.servers.values():
            process.kill()
            process.wait()


@contextmanager
def running_cluster(folder: Path, binary: Path | None) -> Iterator[Clustered]:
    folder.mkdir(parents=True)
    cluster = Clustered(folder, binary or find_binary())
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
