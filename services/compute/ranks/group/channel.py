"""Channel: one connection between rank 0 and another rank. Messages arrive whole and in order."""

import socket
import struct
import time
from contextlib import suppress
from typing import Any

from services.compute.ranks.group.commands import decode, encode
from shared.process.errors import Invalid

FRAME = struct.Struct("<I")  # bytes of what follows
LONGEST = 1 << 28  # bytes of a message: more is no message of ours


class Channel:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def send(self, message: Any) -> None:
        """Send one of COMMANDS. Raises OSError where the other end is gone."""
        self.send_encoded(encode(message))

    def send_encoded(self, encoded: bytes) -> None:
        send_frame(self.connection, encoded)

    def has_come(self, within_s: float) -> bool:
        """Whether something can be received, or never will be, within that time."""
        self.connection.settimeout(within_s)
        try:
            self.connection.recv(1, socket.MSG_PEEK)
        except TimeoutError:
            return False
        except OSError:  # receive says it
            return True
        finally:
            self.connection.settimeout(None)
        return True

    def receive(self, busy_s: float = 0.0) -> Any:
        """Wait for the next message, awake for busy_s: a thread that sleeps takes some tens of microseconds to
        wake up. Raises EOFError where none will come, OSError, or Invalid."""
        await_awake(self.connection, busy_s)
        return decode(receive_frame(self.connection))


def await_awake(connection: socket.socket, busy_s: float) -> None:
    """Return when there is something to read, or after that time."""
    until = time.perf_counter() + busy_s
    while time.perf_counter() < until:
        with suppress(BlockingIOError):
            connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            return


def send_frame(connection: socket.socket, data: bytes) -> None:
    connection.sendall(FRAME.pack(len(data)) + data)


def receive_frame(connection: socket.socket, longest: int = LONGEST, deadline: float | None = None) -> bytes:
    """deadline: of all of it (monotonic, s). Raises EOFError, OSError, or Invalid for a longer one."""
    (length,) = FRAME.unpack(_receive(connection, FRAME.size, deadline))
    if length > longest:
        raise Invalid(f"this is not a message of a group: {length} bytes")
    return _receive(connection, length, deadline)


def _receive(connection: socket.socket, count: int, deadline: float | None) -> bytes:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        if deadline is not None:
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError("timed out")
            connection.settimeout(left)
        if not (received := connection.recv_into(view)):
            raise EOFError("the connection ended")
        view = view[received:]
    return bytes(data)
