"""A way to Redis whose replies get lost: a proxy on a Unix socket whose connections become half open, as behind a firewall that forgets them.

What a client sends still arrives, and Redis does it; nothing comes back on that connection ever again, and nobody closes it.
"""

import contextlib
import select
import socket
import threading
from collections.abc import Callable
from pathlib import Path


class Connection:
    """One client's, with its own to the server."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.is_heartbeat = False  # it has asked who is alive
        self.is_half_open = False

    def serve(self, is_lost: Callable[["Connection"], bool]) -> None:
        with self.client, self.server, contextlib.suppress(OSError):
            while True:
                for ready in select.select([self.client, self.server], [], [])[0]:
                    data = ready.recv(1 << 20)
                    if not data:
                        return
                    if ready is self.client:
                        self.is_heartbeat = self.is_heartbeat or b"SMEMBERS" in data
                        self.server.sendall(data)
                        continue
                    self.is_half_open = self.is_half_open or is_lost(self)
                    if not self.is_half_open:
                        self.client.sendall(data)


class HalfOpenRedis:
    """Listens at `path` while the `with` lasts. `server` is the real server's socket."""

    def __init__(self, server: Path, path: Path) -> None:
        self.server = server
        self.path = path
        self.url = f"unix://{path}"
        self.loses_all = False  # the replies of all connections, new ones too
        self.loses_loops = False  # the same, but the heartbeat's go on
        self.connections: list[Connection] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> "HalfOpenRedis":
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen(64)
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self._listener.close()
        for each in self.connections:
            for end in (each.client, each.server):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def cut_replies(self) -> None:
        """Whatever is open now is half open from now on; what is opened later is well."""
        for each in self.connections:
            each.is_half_open = True

    def _is_lost(self, connection: Connection) -> bool:
        return self.loses_all or (self.loses_loops and not connection.is_heartbeat)

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(str(self.server))
                self.connections.append(Connection(client, server))
                self._start(self.connections[-1].serve, self._is_lost)
