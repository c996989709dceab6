"""TLS handshakes, counted and timed from the moment that a connection is accepted.

asyncio's own begin before any protocol hears of them and last for a minute: a thousand connections
that send three bytes each would use up the files of this process. Here so many are under way at
once and no more. One more ends the oldest of the address that has most, so an honest client, whose
handshake takes milliseconds, gets through, however many others there are and wherever they come from.
"""

import asyncio
import ssl
from collections import Counter
from collections.abc import Callable
from typing import Any, cast

from services.gateway.http.protocol import PatientProtocol
from shared.process.telemetry import get_logger

log = get_logger("penstock.gateway")

HANDSHAKE_TIMEOUT_S = 5.0


class Handshakes:
    """The handshakes under way at this gateway."""

    def __init__(self, context: ssl.SSLContext, max_handshakes: int, timeout_s: float = HANDSHAKE_TIMEOUT_S) -> None:
        self.context = context
        self.max_handshakes = max_handshakes
        self.timeout_s = timeout_s
        self.under_way: dict[Handshake, asyncio.Task[None]] = {}  # the oldest first
        self._num_by_address: Counter[str] = Counter()

    def begin(self, handshake: "Handshake") -> None:
        if len(self.under_way) >= self.max_handshakes:
            self._end_one()
        self._num_by_address[handshake.address] += 1
        task = self.under_way[handshake] = asyncio.create_task(handshake.shake())
        task.add_done_callback(lambda _: self._forget(handshake))

    def _end_one(self) -> None:
        [(address, _)] = self._num_by_address.most_common(1)
        oldest = next(each for each in self.under_way if each.address == address)
        self._forget(oldest)
        oldest.transport.abort()

    def _forget(self, handshake: "Handshake") -> None:
        if self.under_way.pop(handshake, None) is not None:
            self._num_by_address[handshake.address] -= 1
            if not self._num_by_address[handshake.address]:
                del self._num_by_address[handshake.address]


class Handshake(asyncio.Protocol):
    """A connection until its handshake is done; from then on it is that of the protocol that `then`
    makes."""

    transport: asyncio.Transport
    address: str

    def __init__(self, handshakes: Handshakes, then: Callable[[], PatientProtocol]) -> None:
        self.handshakes = handshakes
        self.then = then
        self._early: list[bytes] = []  # what came between the handshake's end and the hand-over
        self._is_lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.pause_reading()  # until the handshake reads: on asyncio's own loop, whose order this relies on
        peer: Any = self.transport.get_extra_info("peername")
        self.address = str(peer[0]) if isinstance(peer, tuple) else ""
        self.handshakes.begin(self)

    def data_received(self, data: bytes) -> None:
        self._early.append(data)

    def connection_lost(self, _: Exception | None) -> None:
        self._is_lost = True

    async def shake(self) -> None:
        """The handshake, and the hand-over. One that fails, or takes too long, is the end of its
        connection."""
        loop, shakes = asyncio.get_running_loop(), self.handshakes
        try:
            secured = await loop.start_tls(
                self.transport, self, shakes.context, server_side=True, ssl_handshake_timeout=shakes.timeout_s
            )
        except (OSError, ssl.SSLError) as error:
            log.debug("no TLS handshake", client=self.address, error=error)
            self.transport.abort()
            return
        if secured is None or self._is_lost:
            return
        protocol = self.then()
        secured.set_protocol(protocol)
        protocol.connection_made(secured)
        for data in self._early:
            protocol.data_received(data)


def shaken(protocol: type[PatientProtocol], context: ssl.SSLContext) -> Callable[..., Handshake]:
    """Put the protocol behind a handshake with this certificate, for uvicorn's `http=`."""
    handshakes = Handshakes(context, protocol.max_connections)
    return lambda **given: Handshake(handshakes, lambda: protocol(**given))
