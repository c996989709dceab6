"""Connections that trickle, do not read, or are too many: each has its bound, and none costs the others anything."""

import asyncio
import json
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from services.gateway.http.protocol import MAX_HEAD_BYTES, patient
from shared.process.settings import GatewaySettings
from shared.wire.streams import tombstone_key
from tests.conftest import running_redis
from tests.deployment import Deployment
from tests.gateway.backstage import Backstage
from tests.gateway.conftest import start_gateways
from tests.gateway.streams import BODY
from tests.waiting import wait_until

CLOSED_WITHIN_S = 15.0  # far above the gateway's patience, for a slow machine; far below the 25 s of what trickles
KEEP_ALIVE_S = 4
GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def impatient(
    tmp_path_factory: pytest.TempPathFactory, redis_binary: Path | None
) -> Iterator[tuple[Deployment, Backstage]]:
    """A gateway with short patience, but for bodies: while one test holds some of them back, it sends another."""
    folder = tmp_path_factory.mktemp("impatient")
    with running_redis(folder / "redis", redis_binary) as url:
        deployment, backstage = Deployment(url, folder), Backstage(url)
        try:
            start_gateways(
                deployment,
                header_timeout_s=0.5,
                keep_alive_timeout_s=KEEP_ALIVE_S,
                write_timeout_s=0.5,
                body_timeout_s=5.0,
                max_connections=8,
                max_body_memory=1 << 20,
            )
            yield deployment, backstage
        finally:
            deployment.stop()
            backstage.close()


@contextmanager
def standing_still(deployment: Deployment) -> Iterator[None]:
    """The gateway is stopped. What is sent meanwhile over a new connection is there when it
    accepts: its patience is not with this process' speed.
    """
    (gateway,) = deployment.processes.values()
    gateway.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        gateway.send_signal(signal.SIGCONT)


def connect(deployment: Deployment) -> socket.socket:
    return socket.create_connection(("127.0.0.1", next(iter(deployment.ports.values()))), timeout=60)


@contextmanager
def connection(deployment: Deployment, begin: bytes = b"") -> Iterator[socket.socket]:
    """A new one, over which `begin` has been sent."""
    with ExitStack() as stack:
        with standing_still(deployment):
            sock = stack.enter_context(connect(deployment))
            sock.sendall(begin)
        yield sock


def answer_to_a_flood(deployment: Deployment, head: bytes, piece: bytes) -> bytes:
    """The answer to a head and then one piece after the other without an end; empty if the connection was cut."""
    with suppress(ConnectionError), connection(deployment, head + piece * (1 + MAX_HEAD_BYTES // len(piece))) as sock:
        return read_response(sock)
    return b""


def trickle_until_closed(sock: socket.socket, data: bytes) -> float:
    """Send a byte now and then until the other side has had enough; returns after how many seconds."""
    started_at = time.monotonic()
    try:
        for byte in data:
            sock.sendall(bytes([byte]))
            time.sleep(0.05)
            sock.settimeout(0.001)
            try:
                if sock.recv(1) == b"":
                    return time.monotonic() - started_at
            except TimeoutError:
                continue
    except OSError:
        return time.monotonic() - started_at
    raise AssertionError("it was never closed")


def read_response(sock: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data or len(data.partition(b"\r\n\r\n")[2]) < int(
        data.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
    ):
        if not (some := sock.recv(4096)):
            raise ConnectionResetError
        data += some
    return data


def answer(deployment: Deployment, request: bytes) -> bytes:
    with connection(deployment, request) as sock:
        return read_response(sock)


def test_headers_that_trickle_or_never_come_are_not_waited_for(impatient: tuple[Deployment, Backstage]) -> None:
    deployment, _ = impatient
    with connection(deployment) as silent, connection(deployment) as slow, connection(deployment, GET) as second:
        assert read_response(second).startswith(b"HTTP/1.1 200")
        assert trickle_until_closed(slow, b"GET / HTTP/1.1\r\nX: " + b"x" * 500) < CLOSED_WITHIN_S
        assert silent.recv(1) == b""
        assert (
            trickle_until_closed(second, b"GET / HTTP/1.1\r\nX: " + b"x" * 500) < CLOSED_WITHIN_S
        )  # a request after one that was answered


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"HTTP/1.1\r\n", 400),
        (b"HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n", 400),
        (b"HTTP/1.1\r\nHost:\r\n", 200),
        (b"HTTP/1.0\r\n", 200),
    ],
    ids=["none", "two", "empty", "none in HTTP/1.0"],
)
def test_a_request_has_one_host(impatient: tuple[Deployment, Backstage], head: bytes, status: int) -> None:
    reply = answer(impatient[0], b"GET /version " + head + b"\r\n")
    assert int(reply.split()[1]) == status
    assert status == 200 or json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_host"


@pytest.mark.parametrize("request_bytes", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nHost localhost\r\n\r\n"])
def test_what_is_no_http_is_an_error_in_the_usual_shape(
    impatient: tuple[Deployment, Backstage], request_bytes: bytes
) -> None:
    head, _, body = answer(impatient[0], request_bytes).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"application/json" in head
    assert json.loads(body)["error"] == {
        "message": "this is no HTTP/1.1 request",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_http",
    }


def test_what_anybody_can_send_makes_no_warning(impatient: tuple[Deployment, Backstage]) -> None:
    deployment, _ = impatient
    assert answer(deployment, b"nonsense\r\n\r\n").startswith(b"HTTP/1.1 400 ")
    upgrade = b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n"
    assert answer(deployment, upgrade).startswith(b"HTTP/1.1 200 ")
    told = deployment.logs()
    assert "error=invalid_http" in told and "uvicorn" not in told and "WebSocket" not in told


@pytest.mark.parametrize(
    "head", [GET[:-2], b"GET /", b"GET / HTTP/1.1\r\nX: ", b""], ids=["many headers", "path", "header", "nothing"]
)
def test_headers_have_a_bound_on_their_bytes(impatient: tuple[Deployment, Backstage], head: bytes) -> None:
    reply = answer_to_a_flood(impatient[0], head, b"X: x\r\n" if head == GET[:-2] else b"x" if head else b"\r\n")
    error = json.loads(reply.partition(b"\r\n\r\n")[2])["error"]
    assert reply.startswith(b"HTTP/1.1 431 ")
    assert (error["type"], error["code"]) == ("invalid_request_error", "headers_too_long")


def test_trailers_have_it_too_and_long_bodies_in_small_chunks_do_not(impatient: tuple[Deployment, Backstage]) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    assert answer_to_a_flood(impatient[0], head + b"1\r\n{\r\n0\r\n" + b"X: x\r\n" * 50_000, b"X: x\r\n") == b""
    reply = answer(impatient[0], head + b"1\r\n \r\n" * 40_000 + b"0\r\n\r\n")
    assert (
        reply.startswith(b"HTTP/1.1 400")
        and json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_json"
    )


def test_an_upgrade_to_websockets_is_answered_as_what_it_is_without(impatient: tuple[Deployment, Backstage]) -> None:
    asked = GET.replace(
        b"\r\n\r\n",
        b"\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: "
        b"dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
    )
    assert answer(impatient[0], asked).startswith(b"HTTP/1.1 200 ")


def test_an_idle_connection_outlives_headers_patience_and_is_closed_in_its_own_time(
    impatient: tuple[Deployment, Backstage],
) -> None:
    deployment, _ = impatient
    with connection(deployment, GET) as idle, connection(deployment, GET) as teasing:
        for each in (teasing, idle):
            assert read_response(each).startswith(b"HTTP/1.1 200")
        time.sleep(0.8)
        started_at = time.monotonic()
        idle.sendall(GET)
        assert read_response(idle).startswith(b"HTTP/1.1 200")
        with suppress(ConnectionError):  # that time may be over already
            teasing.sendall(b"\r\n")  # begins no request
        assert idle.recv(1) == b"" and time.monotonic() - started_at > KEEP_ALIVE_S - 1
        with suppress(ConnectionResetError):
            assert teasing.recv(1) == b""


def test_a_body_that_does_not_come_is_408(impatient: tuple[Deployment, Backstage]) -> None:
    deployment, _ = impatient
    with connection(
        deployment, b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
    ) as sock:
        reply = read_response(sock)
        assert (
            reply.startswith(b"HTTP/1.1 408")
            and json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_timeout"
        )
        assert sock.recv(1) == b""


def test_bodies_that_are_half_here_can_not_take_all_memory(impatient: tuple[Deployment, Backstage]) -> None:
    """With a bound of 1 MiB: a third body of 400 KiB is refused while two others are waited for,
    and welcome when they are gone.
    """
    deployment, _ = impatient
    body = json.dumps({"model": "m", "prompt": [1, "x"], "user": "x" * 400_000}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(
        body
    )
    with connection(deployment, head + body[:-1]) as one, connection(deployment, head + body[:-1]) as other:
        reply = wait_until(
            lambda: (third := answer(deployment, head + body)).startswith(b"HTTP/1.1 503") and third,
            description="both bodies are held",
        )
        assert b"retry-after: 1" in reply.lower()
        for sock in (one, other):
            sock.sendall(body[-1:])
            assert read_response(sock).startswith(b"HTTP/1.1 400")
    assert answer(deployment, head + body).startswith(b"HTTP/1.1 400")


def test_a_client_that_does_not_read_loses_its_connection_and_its_sequences(
    impatient: tuple[Deployment, Backstage],
) -> None:
    deployment, backstage = impatient
    body = json.dumps(BODY | {"max_tokens": 5000}).encode()
    with connection(
        deployment,
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body),
    ) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        [request] = backstage.take()
        for position in range(1, 41):  # 10 MB: more than the kernel keeps for a connection
            backstage.write(request, position, text="x" * 250_000)
        wait_until(
            lambda: backstage.client.exists(tombstone_key(request.request_id)), description="it is cut and cancelled"
        )
    backstage.end(request)
    assert backstage.held() == 0


def test_one_connection_too_many_is_told_so(impatient: tuple[Deployment, Backstage]) -> None:
    deployment, _ = impatient
    with ExitStack() as stack:
        with standing_still(deployment):
            sockets = [stack.enter_context(connect(deployment)) for _ in range(9)]
            sockets[-1].sendall(GET)
        reply = read_response(sockets[-1])
        assert (
            reply.startswith(b"HTTP/1.1 503")
            and json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
        )
    wait_until(lambda: deployment.get("/v1/models").status_code == 200, description="there is room again")


def test_the_beginning_of_the_next_request_does_not_cut_an_answer() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(6):
            await send({"type": "http.response.body", "body": b"tick", "more_body": True})
            await asyncio.sleep(0.2)
        await send({"type": "http.response.body", "body": b"end"})

    async def answered() -> bytes:
        settings = GatewaySettings(header_timeout_s=0.4)
        config = uvicorn.Config(app, http=patient(settings), ws="none", lifespan="off", log_config=None)
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await asyncio.sleep(0.1)
        writer.write(b"GET / HTTP/1.1\r\n")
        found = b""
        while b"end" not in found and (some := await asyncio.wait_for(reader.read(1000), 60)):
            found += some
        writer.close()
        server.should_exit = True
        await serving
        return found

    found = asyncio.run(answered())
    assert (found.count(b"tick"), found.count(b"end")) == (6, 1)
