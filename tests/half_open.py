"""A way to Redis whose replies get lost: a proxy on a Unix socket whose connections become half
open, as behind a firewall that forgets them.

What a client sends still arrives, and Redis does it; nothing comes back on that connection ever
again, and nobody closes it.
"""

import contextlib
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.faulty_redis import FaultyRedis


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


@dataclass
class HalfOpenRedis(FaultyRedis):
    """Listens as that does, and disturbs whole connections in place of writes."""

    loses_all: bool = False  # the replies of all connections, new ones too
    loses_loops: bool = False  # the same, but the heartbeat's go on
    connections: list[Connection] = field(default_factory=list)

    def cut_replies(self) -> None:
        """Whatever is open now is half open from now on; what is opened later is well."""
        for each in self.connections:
            each.is_half_open = True

    def _is_lost(self, connection: Connection) -> bool:
        return self.loses_all or (self.loses_loops and not connection.is_heartbeat)

    def _serve(self, client: socket.socket, server: socket.socket) -> None:
        server.connect(str(self.server))
        self.connections.append(connection := Connection(client, server))
        connection.serve(self._is_lost)
