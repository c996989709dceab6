"""RedisConnection: a connection to Redis on which commands are sent now, and their replies are read
later.

Compute sends a step's candidates and goes on to the next step; it reads the replies when that step is
done. A blocking read stays open in the same way: its reply comes when there is something to read,
while the model runs.
"""

import hashlib
import re
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import redis
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from shared.wire.script import in_script, name_of

# redis-py's pipelines type every command as maybe-awaitable, which says nothing here
Pipeline = Any

# the operator has to change the configuration
DENIED = (redis.AuthenticationError, redis.exceptions.AuthorizationError, redis.exceptions.NoPermissionError)
# for a reply, in addition to the time that a read may block: after that the connection is dead without
# notice, or Redis is stopped
REPLY_TIMEOUT_S = 5.0
BLOCKING = ("XREAD", "XREADGROUP")
SCRIPT_OF_PIPELINE = re.compile(r"\(EVAL -- (\w+)\b")  # in the command that redis-py puts before an error


class RedisConnection:
    """One connection of its own. Every method raises what redis-py raises; after that, `close` and
    start over."""

    def __init__(self, client: "redis.Redis") -> None:
        self._client: Any = client
        self._connection: Any = client.connection_pool.make_connection()
        # commands without a reply yet, with redis-py's options, s that they may block, and their scripts
        self._awaited: deque[tuple[str, dict[str, Any], float, str]] = deque()
        self._scripts: set[str] = set()  # digests of the scripts that were sent
        self._sent_at = 0.0

    @property
    def num_awaited(self) -> int:
        return len(self._awaited)

    def send(self, fill: Callable[[Pipeline], None]) -> None:
        """Send the commands that `fill` queues, in one write."""
        pipe = self._client.pipeline(transaction=False)
        fill(pipe)
        commands = pipe.command_stack
        if commands:
            if self._connection._sock is None:
                self._connection.connect()  # which asks Sentinels where to; sending alone would not
            packed = self._connection.pack_commands([self._by_digest(arguments) for arguments, _ in commands])
            # redis-py cuts at 6,000 bytes: each piece would wake Redis
            self._connection.send_packed_command([b"".join(packed)], check_health=False)
            for arguments, options in commands:
                self._awaited.append((arguments[0], options, block_of(arguments), script_of(arguments)))
            self._sent_at = time.monotonic()

    def _by_digest(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The command; with a script's digest if the script was sent on this connection before. (If
        Redis has forgotten it, that is a temporary error: the connection is closed, and the script is
        sent again.)"""
        if arguments[0] != "EVAL":
            return arguments
        digest = digest_of(arguments[1])
        if digest in self._scripts:
            return ("EVALSHA", digest, *arguments[2:])
        self._scripts.add(digest)
        return arguments

    def has_reply(self, wait_s: float = 0.0) -> bool:
        """Whether a reply has come, or comes within wait_s. Raises TimeoutError if none came in the time
        that the commands may take."""
        if not self._awaited:
            return False
        if self._connection.can_read(timeout=wait_s):
            return True
        patience_s = REPLY_TIMEOUT_S + max(block_s for _, _, block_s, _ in self._awaited)
        if time.monotonic() - self._sent_at > patience_s:
            raise RedisTimeoutError(f"no reply for {patience_s:.0f} s")
        return False

    def receive(self, *, leave: int = 0) -> list[Any]:
        """Wait for the replies to all commands but the last `leave`, and return them as redis-py gives
        them.

        Raises the first error among them once all are read, TimeoutError if one does not come.
        """
        replies: list[Any] = []
        first: ResponseError | None = None
        while len(self._awaited) > leave:
            command, options, block_s, script = self._awaited[0]
            if block_s and not self._connection.can_read(timeout=block_s + REPLY_TIMEOUT_S):
                raise RedisTimeoutError(f"no reply to {command} for {block_s + REPLY_TIMEOUT_S:.0f} s")
            try:
                reply = self._connection.read_response()
            except ResponseError as error:
                first, reply = first or (in_script(error, name_of(script)) if script else error), None
            self._awaited.popleft()
            callback = self._client.response_callbacks.get(command)
            replies.append(reply if callback is None or reply is None else callback(reply, **options))
        if first is not None:
            raise first
        return replies

    def fileno(self) -> int:
        """The socket's file descriptor. Valid while a reply is awaited."""
        return int(self._connection._sock.fileno())

    def close(self) -> None:
        """Close the connection; the next `send` opens it again."""
        self._connection.disconnect()
        self._awaited.clear()
        self._scripts.clear()


def wait_for_any(lines: Sequence[RedisConnection], wait_s: float) -> None:
    """Wait until one of the connections that await a reply has one, at most wait_s. Raises what
    has_reply does."""
    awaiting = [line for line in lines if line.num_awaited]
    if not awaiting or any(line.has_reply() for line in awaiting):
        return
    poll = select.poll()
    for line in awaiting:
        poll.register(line.fileno(), select.POLLIN)
    poll.poll(wait_s * 1000)


def reason_of(error: BaseException) -> str:
    """Redis's reason, without the command that redis-py puts before it (its arguments may be a message,
    with what a client asked), but with the name of its script."""
    command, mark, reason = str(error).rpartition(" of pipeline caused error: ")
    if not mark:
        return reason
    script = SCRIPT_OF_PIPELINE.search(command)
    return reason.strip("(),'\"") + (f" (in {script[1]}.lua)" if script else "")


def refusal_of(error: BaseException) -> str:
    """The message for one of DENIED, with what to do about it."""
    wants_password = "already authenticated" in str(error) or "NOAUTH" in str(error)
    hint = (
        ". It asks for a password: redis://:PASSWORD@HOST:PORT/0; that of penstock up is in its data folder's "
        "redis-password"
        if wants_password
        else ""
    )
    return f"Redis refuses: {reason_of(error)}{hint}"


def without_command(error: BaseException) -> BaseException:
    """The error, changed so that also a traceback shows its reason without the command."""
    if isinstance(error, redis.RedisError):
        error.args = (reason_of(error),)
    return error


def block_of(arguments: tuple[Any, ...]) -> float:
    """Seconds that a command may block; 0 if it does not."""
    if arguments[0] not in BLOCKING or b"BLOCK" not in arguments:
        return 0.0
    return float(arguments[arguments.index(b"BLOCK") + 1]) / 1000


def script_of(arguments: tuple[Any, ...]) -> str:
    """The text of the script that a command runs; empty: it runs none."""
    return str(arguments[1]) if arguments[0] == "EVAL" else ""


@cache
def digest_of(script: str) -> str:
    return hashlib.sha1(script.encode()).hexdigest()
