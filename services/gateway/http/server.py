"""The HTTP server: its sockets, bound before anything else is started, and its end, which tells
every open stream where to go on."""

import asyncio
import resource
import socket
import ssl
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import uvicorn

from services.gateway.http.protocol import PatientProtocol
from shared.process.errors import StartupError
from shared.process.settings import GatewaySettings
from shared.process.telemetry import get_logger

log = get_logger("penstock.gateway")

DRAIN_S = 5.0  # after SIGTERM, for running responses; then they are told to resume at another gateway
LAST_WORDS_S = 2.0  # to get that told
BACKLOG, LEAST_BACKLOG = 2048, 64
OTHER_FILES = 128  # connections to Redis, pipes, files
NOT_PEM = "one of them is not PEM, or the key has a password, which must be taken off"
OTHER_KEY = "the key is not this certificate's"
TLS_REASONS = {
    "KEY_VALUES_MISMATCH": OTHER_KEY,
    "NO_CERTIFICATE_ASSIGNED": OTHER_KEY,
    "EE_KEY_TOO_SMALL": "the key is too short",
    "NO_START_LINE": NOT_PEM,
}


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen at every address of the host. Raises StartupError if one is taken."""
    sockets = []
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            sock = socket.socket(family, kind, protocol)
            sockets.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind(address)
            sock.listen(BACKLOG)
    except OSError as error:
        for sock in sockets:
            sock.close()
        raise StartupError(f"could not listen on {host}:{port}: {error.strerror or error}") from None
    return sockets


def check_tls(settings: GatewaySettings) -> ssl.SSLContext | None:
    """Load the certificate and its key. None: plain HTTP. Raises StartupError for a pair that can't
    serve."""
    if settings.tls_certificate is None:
        if settings.tls_key is not None:
            raise StartupError("--tls-key needs --tls-certificate")
        return None
    key = settings.tls_key or settings.tls_certificate
    for flag, path in (("--tls-certificate", settings.tls_certificate), ("--tls-key", key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise StartupError(f"{flag} {path}: {error.strerror}") from None
    mode = key.stat().st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StartupError(f"--tls-key {key}: others may write it; chmod 600 {key}")
    if mode & stat.S_IROTH:
        log.warning("everybody on this machine may read the TLS key", path=str(key), mend=f"chmod 600 {key}")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        server.load_cert_chain(settings.tls_certificate, key, password="")  # uvicorn would ask at the terminal
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or ""
        cause = TLS_REASONS.get(reason, reason or NOT_PEM)
        raise StartupError(
            f"--tls-certificate {settings.tls_certificate} can't serve with the key in {key}: {cause}"
        ) from None
    if problem := refusal_of(server, settings.tls_certificate):
        log.warning("clients will refuse the certificate", path=str(settings.tls_certificate), reason=problem)
    return server


def refusal_of(server: ssl.SSLContext, certificate: Path) -> str:
    """Why a client that trusts this very certificate still refuses it, as when its time is over;
    empty: it does not. By a handshake in memory."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname = False
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.load_verify_locations(certificate)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    asking, serving = client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)
    try:
        for end in (asking, serving, asking):
            with suppress(ssl.SSLWantReadError):
                end.do_handshake()
    except ssl.SSLError as error:
        return getattr(error, "verify_message", None) or error.reason or str(error)
    return ""


def raise_file_limit() -> None:
    """A connection is a file; the usual soft limit of 1,024 is there for programs that use
    select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def backlog_of(max_connections: int) -> int:
    """How many connections may wait to be accepted. They are accepted all at once: more than there
    are files for would stop the accepting for a second."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # 3: twice as many that are answered, and as many handshakes
    return max(LEAST_BACKLOG, min(BACKLOG, (limit - 3 * max_connections - OTHER_FILES) // 2))


class DrainingServer(uvicorn.Server):
    """On SIGTERM: leaves the registry, lets responses end for a while, tells the rest that they can
    be resumed, and then cuts what does not read even that."""

    def __init__(self, config: uvicorn.Config, leave: Callable[[], None], drain: Callable[[], None]) -> None:
        """leave: the registry, which may block; drain: ends the streams, with a word on where they
        go on."""
        super().__init__(config)
        self.leave = leave
        self.drain = drain

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.to_thread(self.leave)
        ending = asyncio.create_task(self._end_streams())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_streams(self) -> None:
        await asyncio.sleep(DRAIN_S)
        self.drain()
        await asyncio.sleep(LAST_WORDS_S)
        for connection in list(self.server_state.connections):
            if isinstance(connection, PatientProtocol):
                connection.cut("the gateway is shutting down")
