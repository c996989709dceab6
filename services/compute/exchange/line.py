"""Line: a connection to Redis on which commands are sent now and their replies are read later.

Compute sends a step's candidates and goes on to the next step; what Redis says is read when that step is done. A blocking read is left standing
in the same way: its reply comes when there is something to read, while the model runs.
"""

import time
from collections.abc import Callable
from typing import Any

from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from shared.transport import Pipeline, Transport

LONGEST_REPLY_S = 30.0  # standing reads end after a second: beyond, the connection is dead and nobody said so


class Line:
    """One connection of its own. Every method raises what redis-py raises; after that, `close` and begin anew."""

    def __init__(self, transport: Transport) -> None:
        self._client = transport.client
        self._connection: Any = transport.client.connection_pool.make_connection()
        self.num_awaited = 0  # replies that are still to be read
        self._sent_at = 0.0

    def send(self, fill: Callable[[Pipeline], None]) -> None:
        """The commands that `fill` queues, in one write."""
        pipe = self._client.pipeline(transaction=False)
        fill(pipe)
        commands = [arguments for arguments, _ in pipe.command_stack]
        if commands:
            self._connection.send_packed_command(self._connection.pack_commands(commands), check_health=False)
            self.num_awaited += len(commands)
            self._sent_at = time.monotonic()

    def has_reply(self, wait_s: float = 0.0) -> bool:
        """Whether a reply has come, or comes within wait_s. Raises TimeoutError where none came for longer than any command takes."""
        if not self.num_awaited:
            return False
        if self._connection.can_read(timeout=wait_s):
            return True
        if time.monotonic() - self._sent_at > LONGEST_REPLY_S:
            raise RedisTimeoutError(f"no reply for {LONGEST_REPLY_S:.0f} s")
        return False

    def receive(self) -> list[Any]:
        """The replies to all that was sent, raw; waits for them. Raises the first error among them once all are read."""
        replies: list[Any] = []
        first: ResponseError | None = None
        while self.num_awaited:
            try:
                replies.append(self._connection.read_response())
            except ResponseError as error:
                first = first or error
            self.num_awaited -= 1
        if first is not None:
            raise first
        return replies

    def close(self) -> None:
        """Hang up; the next `send` connects again."""
        self._connection.disconnect()
        self.num_awaited = 0
