"""Does the proxy do to a connection what its mode says? Before a server that echoes."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.chaos.proxy import MODES, Proxy

PATIENCE_S = 30.0
SILENCE_S = 0.2  # in which nothing comes that will never come


class Echo:
    """A server that keeps what it was sent."""

    def __init__(self, folder: Path) -> None:
        self.seen = b""
        self.writers: list[asyncio.StreamWriter] = []
        self.proxy = Proxy(folder / "p.sock", folder / "s.sock", random.Random(1))

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                self.seen += data
                writer.write(data)

    async def connect(self) -> "Client":
        reader, writer = await asyncio.open_unix_connection(self.proxy.path)
        self.writers.append(writer)
        return Client(reader, writer)

    async def close(self) -> None:
        """Both sides, so that nothing is left for the garbage collector to warn of."""
        self.proxy.close()
        for writer in self.writers:
            writer.transport.abort()
        while self.proxy.connections:
            await asyncio.sleep(0.01)
        for writer in self.writers:
            with suppress(OSError):
                await writer.wait_closed()


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def ask(self, data: bytes) -> bytes:
        self.writer.write(data)
        return await asyncio.wait_for(self.reader.readexactly(len(data)), PATIENCE_S)

    async def hears_nothing(self) -> bool:
        try:
            return not await asyncio.wait_for(self.reader.read(1), SILENCE_S)
        except TimeoutError:
            return True


def with_echo(folder: Path, test: Callable[[Echo], Awaitable[None]]) -> None:
    async def run() -> None:
        echo = Echo(folder)
        server = await asyncio.start_unix_server(echo.serve, folder / "s.sock")
        await echo.proxy.open()
        try:
            await test(echo)
        finally:
            await echo.close()
            server.close()
            await server.wait_closed()

    asyncio.run(run())


@pytest.mark.parametrize("mode", ["", "delay", "trickle"])
def test_whatever_is_only_slow_arrives_whole(tmp_path: Path, mode: str) -> None:
    async def test(echo: Echo) -> None:
        client = await echo.connect()
        echo.proxy.begin(mode)
        assert await client.ask(bytes(range(256)) * 8) == bytes(range(256)) * 8

    with_echo(tmp_path, test)


def test_what_is_sent_into_a_stall_arrives_after_it(tmp_path: Path) -> None:
    async def test(echo: Echo) -> None:
        client = await echo.connect()
        assert await client.ask(b"a") == b"a"
        echo.proxy.begin("stall")
        client.writer.write(b"b")
        assert await client.hears_nothing()
        assert echo.seen == b"a"
        echo.proxy.heal()
        assert await asyncio.wait_for(client.reader.readexactly(1), PATIENCE_S) == b"b"

    with_echo(tmp_path, test)


@pytest.mark.parametrize(("mode", "is_seen"), [("lose-requests", False), ("lose-replies", True), ("half-open", False)])
def test_a_connection_that_has_lost_bytes_stays_dead_and_a_new_one_works(
    tmp_path: Path, mode: str, is_seen: bool
) -> None:
    async def test(echo: Echo) -> None:
        client = await echo.connect()
        assert await client.ask(b"a") == b"a"
        echo.proxy.begin(mode)
        client.writer.write(b"b")
        assert await client.hears_nothing()
        assert (b"b" in echo.seen) == is_seen
        echo.proxy.heal()
        client.writer.write(b"c")
        assert await client.hears_nothing()
        assert not client.reader.at_eof()  # nobody tells it
        assert await (await echo.connect()).ask(b"d") == b"d"

    with_echo(tmp_path, test)


def test_a_cut_breaks_connections_and_refuses_new_ones(tmp_path: Path) -> None:
    async def test(echo: Echo) -> None:
        client = await echo.connect()
        assert await client.ask(b"a") == b"a"
        echo.proxy.begin("cut")
        assert await asyncio.wait_for(client.reader.read(), PATIENCE_S) == b""
        refused = await echo.connect()
        assert await asyncio.wait_for(refused.reader.read(), PATIENCE_S) == b""
        echo.proxy.heal()
        assert await (await echo.connect()).ask(b"b") == b"b"

    with_echo(tmp_path, test)


def test_every_mode_has_its_test() -> None:
    assert set(MODES) == {"delay", "trickle", "stall", "lose-requests", "lose-replies", "half-open", "cut"}
