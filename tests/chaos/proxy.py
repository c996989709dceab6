"""A network that fails, between one process and Redis: a proxy on a Unix socket. Its modes:

    stall            nothing moves in either direction; what was sent arrives afterwards
    lose-requests    what the process sends is lost, and its connection stays open without a reply
    lose-replies     Redis does what it is asked; its replies on that connection are lost
    half-open        Redis has closed the present connections, and the process was not told;
                     new connections work at once
    cut              every connection breaks, and none can be made
    delay            every piece takes up to 0.3 s
    trickle          a few hundred bytes at a time

A connection that has lost bytes stays dead after the fault, as with TCP, until the process closes it.
"""

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

MODES = ("stall", "lose-requests", "lose-replies", "half-open", "cut", "delay", "trickle")
PIECE = 1 << 16  # bytes
LONGEST_DELAY_S = 0.3
TRICKLE, TRICKLE_PAUSE_S = 300, 0.002  # bytes at a time, and the pause after them


@dataclass(slots=True, eq=False)
class Connection:
    """A connection of the process, and what leads on from it."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    has_lost_requests: bool = False
    has_lost_replies: bool = False

    def close(self) -> None:
        self.client.transport.abort()
        self.server.transport.abort()


@dataclass(slots=True)
class Proxy:
    """Listens at `path`, between `open` and `close`."""

    path: Path
    server: Path  # Redis's socket
    rng: random.Random
    mode: str = ""  # empty: bytes pass
    connections: set[Connection] = field(default_factory=set)
    _flowing: asyncio.Event = field(default_factory=asyncio.Event)
    _listener: asyncio.Server | None = None

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    async def open(self) -> None:
        self._flowing.set()
        self._listener = await asyncio.start_unix_server(self._serve, self.path)

    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for each in list(self.connections):
            each.close()

    def begin(self, mode: str) -> None:
        """Fail in this way, until `heal`."""
        self.mode = mode
        if mode == "stall":
            self._flowing.clear()
        for each in list(self.connections) if mode in ("cut", "half-open") else ():
            if mode == "cut":
                each.close()
            else:
                each.has_lost_requests = each.has_lost_replies = True
                each.server.transport.abort()

    def heal(self) -> None:
        self.mode = ""
        self._flowing.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.CancelledError):  # the run is over: asyncio would print a traceback for each connection
            await self._join(reader, writer)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection of the process, until either side or a cut closes it."""
        await self._flowing.wait()
        try:
            if self.mode == "cut":
                raise ConnectionRefusedError
            from_server, to_server = await asyncio.open_unix_connection(self.server)
        except OSError:
            writer.transport.abort()
            return
        connection = Connection(writer, to_server)
        self.connections.add(connection)
        replies = asyncio.create_task(self._replies(connection, from_server))
        try:
            await self._requests(connection, reader)
        finally:  # the process has closed it, or the cut has
            replies.cancel()
            self.connections.discard(connection)
            connection.close()

    async def _requests(self, connection: Connection, reader: asyncio.StreamReader) -> None:
        with suppress(OSError):
            while data := await reader.read(PIECE):
                connection.has_lost_requests |= self.mode == "lose-requests"
                await self._pass_on(data, connection.server, is_lost=connection.has_lost_requests)

    async def _replies(self, connection: Connection, reader: asyncio.StreamReader) -> None:
        with suppress(OSError):
            while data := await reader.read(PIECE):
                connection.has_lost_replies |= self.mode == "lose-replies"
                await self._pass_on(data, connection.client, is_lost=connection.has_lost_replies)
        if not connection.has_lost_replies and self.mode not in ("lose-replies", "stall"):
            connection.client.transport.abort()  # Redis has closed it, and nothing hides that

    async def _pass_on(self, data: bytes, writer: asyncio.StreamWriter, *, is_lost: bool) -> None:
        await self._flowing.wait()
        if is_lost:
            return
        if self.mode == "delay":
            await asyncio.sleep(self.rng.uniform(0, LONGEST_DELAY_S))
        size = TRICKLE if self.mode == "trickle" else len(data)
        for at in range(0, len(data), size):
            writer.write(data[at : at + size])
            await writer.drain()
            if size < len(data):
                await asyncio.sleep(TRICKLE_PAUSE_S)
