"""Line: a connection to Redis on which commands are sent now and their replies are read later.

Compute sends a step's candidates and goes on to the next step; what Redis says is read when that step is done. A blocking read is left standing
in the same way: its reply comes when there is something to read, while the model runs.
"""

from collections.abc import Callable
from typing import Any

from redis.exceptions import ResponseError

from shared.transport import Pipeline, Transport


class Line:
    """One connection of its own. Every method raises what redis-py raises; after that, `close` and begin anew."""

    def __init__(self, transport: Transport) -> None:
        self._client = transport.client
        self._connection: Any = transport.client.connection_pool.make_connection()
        self.num_awaited = 0  # replies that are still to be read

    def send(self, fill: Callable[[Pipeline], None]) -> None:
        """The commands that `fill` queues, in one write."""
        pipe = self._client.pipeline(transaction=False)
        fill(pipe)
        commands = [arguments for arguments, _ in pipe.command_stack]
        if commands:
            self._connection.send_packed_command(self._connection.pack_commands(commands), check_health=False)
            self.num_awaited += len(commands)

    def has_reply(self, wait_s: float = 0.0) -> bool:
        """Whether a reply has come, or comes within wait_s."""
        return self.num_awaited > 0 and bool(self._connection.can_read(timeout=wait_s))

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
