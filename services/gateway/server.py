"""The HTTP server: its sockets, bound before anything else is started, and its end, which tells every open stream where to go on."""

import asyncio
import resource
import socket
import ssl

import uvicorn

from services.gateway.context import Context
from services.gateway.protocol import PatientProtocol
from shared.errors import StartupError
from shared.settings import GatewaySettings
from shared.telemetry import get_logger

log = get_logger("penstock.gateway")

DRAIN_S = 5.0  # after SIGTERM, for running responses; then they are told to resume at another gateway
LAST_WORDS_S = 2.0  # to get that told
BACKLOG = 2048


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen at every address of the host. Raises StartupError if one is taken."""
    sockets = []
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE):
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


def check_tls(settings: GatewaySettings) -> None:
    """Raises StartupError for a certificate and a key that can't serve."""
    if settings.tls_certificate is None:
        if settings.tls_key is not None:
            raise StartupError("--tls-key needs --tls-certificate")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_certificate, settings.tls_key, password="")  # uvicorn would ask at the terminal
    except (OSError, ValueError) as error:  # ssl's own errors are OSErrors
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        raise StartupError(f"--tls-certificate {settings.tls_certificate} can't serve, with its key: {reason}") from None


def raise_file_limit() -> None:
    """A connection is a file; the usual soft limit of 1,024 is there for programs that use select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class DrainingServer(uvicorn.Server):
    """On SIGTERM: leaves the registry, lets responses end for a while, tells the rest that they can be resumed, and then cuts what does not read even that."""

    def __init__(self, config: uvicorn.Config, context: Context) -> None:
        super().__init__(config)
        self.context = context

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.to_thread(self.context.stage.leave)
        ending = asyncio.create_task(self._end_streams())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_streams(self) -> None:
        await asyncio.sleep(DRAIN_S)
        self.context.pipeline.subscriptions.drain()
        self.context.store.drain()
        self.context.watch.drain()
        await asyncio.sleep(LAST_WORDS_S)
        for connection in list(self.server_state.connections):
            if isinstance(connection, PatientProtocol):
                connection.cut("the gateway is shutting down")
