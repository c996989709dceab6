"""A Redis that fails on purpose: a proxy on a Unix socket that forwards to the real server and
disturbs one write of its clients.

A write is what a client sends at once: a command, or a pipeline of them. Which one is disturbed is
counted over all connections, from `arm` on: one proxy for each stage, so that the count is the
stage's own. The faults:

    cut                     the connection breaks, and Redis has not seen the write
    lost                    Redis has done it, and the connection breaks before the reply
    silent                  Redis has done it, no reply comes, and the connection stays open: the client hangs up
    late                    the same, but Redis does it only then, when the client has most likely sent it again
    READONLY, OOM, …        each command of it is answered with that error, and Redis has not seen it
"""

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

ERRORS = {
    "READONLY": "READONLY You can't write against a read only replica.",
    "OOM": "OOM command not allowed when used memory > 'maxmemory'.",
    "NOREPLICAS": "NOREPLICAS Not enough good replicas to write.",
    "MISCONF": "MISCONF Errors writing to the AOF file: No space left on device",
    "LOADING": "LOADING Redis is loading the dataset in memory",
}
LATE_S = 0.2  # after the client has hung up
FAULTS = ("cut", "lost", "silent", "late", *ERRORS)


def commands_in(data: bytes) -> tuple[list[bytes], bytes]:
    """The names of the whole commands in what a client sent, and what is left: the beginning of one more."""
    names: list[bytes] = []
    at = 0
    while at < len(data):
        end = data.find(b"\r\n", at)
        if end < 0:
            break
        assert data[at : at + 1] == b"*", "clients send arrays"
        name, next_at = b"", end + 2
        for number in range(int(data[at + 1 : end])):
            end = data.find(b"\r\n", next_at)
            size = int(data[next_at + 1 : end]) if end >= 0 else 0
            if end < 0 or len(data) < end + 2 + size + 2:
                return names, data[at:]
            if number == 0:
                name = data[end + 2 : end + 2 + size].upper()
            next_at = end + 2 + size + 2
        names.append(name)
        at = next_at
    return names, data[at:]


@dataclass
class FaultyRedis:
    """Listens at `path` while the `with` lasts. `server` is the real server's socket."""

    server: Path
    path: Path
    num_writes: int = 0  # since `arm`
    names: list[bytes] = field(default_factory=list)  # of the commands since `arm`
    disturbed: list[bytes] = field(default_factory=list)  # the commands of the write that was disturbed
    is_over: bool = False  # what is late has arrived
    _at: int = 0
    _fault: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _sockets: list[socket.socket] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    def __enter__(self) -> "FaultyRedis":
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen(64)
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left: neither a thread nor a socket that the garbage collector would find open in another test."""
        self._listener.shutdown(socket.SHUT_RDWR)  # which ends accept(); close() alone does not
        self._threads[0].join()
        self._listener.close()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments, daemon=True))
        self._threads[-1].start()

    def arm(self, at: int = 0, fault: str = "") -> None:
        """Disturb the at-th write from now on; 0: none."""
        with self._lock:
            self.num_writes, self._at, self._fault = 0, at, fault
            self.names, self.disturbed, self.is_over = [], [], fault != "late"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                self._sockets += [client, server]
                self._start(self._serve, client, server)

    def _serve(self, client: socket.socket, server: socket.socket) -> None:
        """One connection, until either side or a fault ends it."""
        with client, server, contextlib.suppress(OSError):
            server.connect(str(self.server))
            pending, is_lost, is_silent = b"", False, False
            while True:
                for ready in select.select([client, server], [], [])[0]:
                    data = ready.recv(1 << 20)
                    if not data or (ready is server and is_lost):
                        return
                    if ready is server:
                        if not is_silent:
                            client.sendall(data)
                        continue
                    data = pending + data
                    names, pending = commands_in(data)
                    if not names:
                        continue
                    fault = self._count(names)
                    if fault == "cut":
                        return
                    if fault in ERRORS:
                        client.sendall(f"-{ERRORS[fault]}\r\n".encode() * len(names))
                        continue
                    if fault == "late":
                        return self._deliver_late(client, server, data[: len(data) - len(pending)])
                    is_lost, is_silent = fault == "lost", is_silent or fault == "silent"
                    server.sendall(data[: len(data) - len(pending)])

    def _deliver_late(self, client: socket.socket, server: socket.socket, write: bytes) -> None:
        while client.recv(1 << 20):
            pass
        time.sleep(LATE_S)
        server.sendall(write)
        server.recv(1 << 20)
        self.is_over = True

    def _count(self, names: list[bytes]) -> str:
        """The fault of this write; empty: none."""
        with self._lock:
            self.num_writes += 1
            self.names += names
            if self.num_writes != self._at:
                return ""
            self.disturbed = names
            return self._fault
