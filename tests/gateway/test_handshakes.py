"""TLS handshakes that never end: they are counted, and keep nobody else out."""

import asyncio
import socket
import ssl
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest
import trustme

from services.gateway.http.handshake import Handshake, Handshakes
from services.gateway.http.server import raise_file_limit
from tests.deployment import Deployment
from tests.gateway.backstage import Backstage
from tests.waiting import wait_until

HALF = b"\x16\x03\x01"  # as a handshake begins
MANY = 1300


def read_all(sock: socket.socket) -> bytes:
    with suppress(ConnectionError):
        return sock.recv(100)
    return b""


def test_half_handshakes_keep_nobody_out(
    deployment: Deployment, tmp_path: Path, own: Backstage, monkeypatch: pytest.MonkeyPatch
) -> None:
    raise_file_limit()
    authority = trustme.CA()
    authority.issue_cert("localhost").private_key_and_cert_chain_pem.write_to_path(tmp_path / "own.pem")
    (tmp_path / "own.pem").chmod(0o600)
    few_files = tmp_path / "python"
    few_files.write_text(f'#!/bin/sh\nulimit -n 1024\nexec "{sys.executable}" "$@"\n')
    few_files.chmod(0o755)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "executable", str(few_files))
        gateway = deployment.start("gateway", tls_certificate=tmp_path / "own.pem", max_connections=100)
    deployment.wait_live(gateway)
    port, context = deployment.ports[gateway], ssl.create_default_context()
    authority.configure_trust(context)
    with (
        ExitStack() as stack,
        httpx.Client(base_url=f"https://localhost:{port}", verify=context, timeout=60, trust_env=False) as before,
    ):
        wait_until(lambda: before.get("/ready").status_code == 200, description="the gateway is ready")
        half = [stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60)) for _ in range(MANY)]
        for sock in half:
            with suppress(ConnectionError):
                sock.sendall(HALF)
        for _ in range(5):  # each over a connection of its own
            with httpx.Client(
                transport=httpx.HTTPTransport(verify=context, local_address="127.0.0.2"), timeout=60
            ) as other:
                assert other.get(f"https://localhost:{port}/v1/models").status_code == 200
        assert before.get("/v1/models").status_code == 200, "who had a connection has it still"
        assert [read_all(sock) for sock in half] == [b""] * MANY, "all of them end"
        assert (
            httpx.get(f"https://localhost:{port}/v1/models", verify=context, timeout=60, trust_env=False).status_code
            == 200
        )


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.transport.write(data)


def test_one_more_handshake_ends_the_oldest_of_the_address_that_has_most(tmp_path: Path) -> None:
    authority = trustme.CA()
    server_side, client_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("localhost").configure_cert(server_side)
    authority.configure_trust(client_side)

    async def shaking() -> None:
        loop = asyncio.get_running_loop()
        handshakes = Handshakes(server_side, max_handshakes=5, timeout_s=600.0)
        server = await loop.create_server(lambda: Handshake(handshakes, Echo), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]

        async def until(count: int) -> None:
            while len(handshakes.under_way) != count:
                await asyncio.sleep(0.01)

        quiet = socket.create_connection(("127.0.0.1", port), source_address=("127.0.0.2", 0))
        await until(1)
        flood = []
        for number in range(4):
            flood.append(await asyncio.open_connection("127.0.0.1", port))
            await until(number + 2)
        for number in range(4):
            flood.append(await asyncio.open_connection("127.0.0.1", port))
            assert await flood[number][0].read() == b"", (
                "the oldest of the flood has ended, though the quiet one is older"
            )
            assert len(handshakes.under_way) == 5
        quiet.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=quiet, ssl=client_side, server_hostname="localhost")
        for _ in range(2):
            writer.write(b"hello")
            assert await reader.readexactly(5) == b"hello"
        await until(4)
        for each in (writer, *(each for _, each in flood)):
            each.close()
        await until(0)
        server.close()

    asyncio.run(asyncio.wait_for(shaking(), 120))


def test_a_handshake_that_does_not_come_ends(tmp_path: Path) -> None:
    authority, server_side = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(server_side)

    async def waiting() -> None:
        handshakes = Handshakes(server_side, max_handshakes=5, timeout_s=0.1)
        server = await asyncio.get_running_loop().create_server(lambda: Handshake(handshakes, Echo), "127.0.0.1", 0)
        for begin in (b"", HALF, b"GET / HTTP/1.1\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
            writer.write(begin)
            with suppress(ConnectionError):
                await reader.read()
            writer.close()
        while handshakes.under_way:
            await asyncio.sleep(0.01)
        server.close()

    asyncio.run(asyncio.wait_for(waiting(), 120))
