"""A connection to Redis that retries while Redis can't serve. entries.py moves messages over it.

Every error of Redis is handled here. `is_temporary` says which ones pass (Redis is away, is loading,
may not write at the moment, has come back empty): they are retried indefinitely, and shown as
`Transport.problem`. Any other error is a bug or a wrong configuration; it ends the process.
"""

import random
import re
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedConnection

from shared.process.errors import Recoverable, StartupError, words_of
from shared.process.telemetry import get_logger
from shared.wire.cells import CellConnection, Nodes
from shared.wire.line import REPLY_TIMEOUT_S, Pipeline, RedisConnection, reason_of, refusal_of
from shared.wire.redis_urls import parse_named, wrong_url

log = get_logger("penstock.transport")

T = TypeVar("T")
REFUSALS = (
    redis.ReadOnlyError
    | redis.OutOfMemoryError
    | redis.exceptions.NoScriptError
    | redis.exceptions.TryAgainError
    | redis.exceptions.MasterDownError
    | redis.exceptions.AskError
    | redis.exceptions.ClusterDownError
)
TEMPORARY = re.compile(
    r"\b(LOADING|READONLY|NOREPLICAS|MISCONF|OOM|MASTERDOWN|NOGROUP|UNBLOCKED|NOSCRIPT|TRYAGAIN|CLUSTERDOWN|BUSY)\b"
    r"|non local key"
)  # also within a script's error. A key is not local while its slot moves
NO_GROUP = re.compile(r"\b(NOGROUP|UNBLOCKED)\b")
FIRST_RETRY_S, LONGEST_RETRY_S = 0.05, 2.0
WARN_EVERY_S = 5.0


def is_temporary(error: BaseException) -> bool:
    """Whether the same call may succeed later without a change of ours."""
    if isinstance(error, redis.AuthenticationError | redis.exceptions.AuthorizationError):
        return False
    # loading its data, after a restart, is a ConnectionError
    if isinstance(error, redis.ConnectionError | redis.TimeoutError | OSError | REFUSALS):
        return True
    return isinstance(error, redis.RedisError) and TEMPORARY.search(reason_of(error)) is not None


def connect(url: str, timeout_s: float = REPLY_TIMEOUT_S) -> "redis.Redis":
    """A client that parses with hiredis. timeout_s: for a reply; then the connection is closed. It does
    not retry: `Transport.persist` does, and can be interrupted."""
    return redis.Redis.from_pool(pool_of(url, timeout_s, CellConnection))


def pool_of(url: str, timeout_s: float, in_cluster: type[SentinelManagedConnection]) -> "redis.ConnectionPool":
    """Connections to the Redis of a URL. in_cluster: their class if it is a cluster."""
    options: dict[str, Any] = {
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": min(5.0, timeout_s),
        "socket_timeout": timeout_s,
    }
    try:
        if (named := parse_named(url)) is None:
            return redis.ConnectionPool.from_url(url, **options)
    except ValueError as error:
        raise StartupError(f"PENSTOCK_REDIS_URL is not a Redis URL: {wrong_url(url, error)}") from None
    asked = (
        Nodes(named)
        if named.cell
        else Sentinel(named.addresses, sentinel_kwargs=named.own_options | {"retry": Retry(NoBackoff(), 0)})  # type: ignore[no-untyped-call]
    )
    kind = in_cluster if named.cell else SentinelManagedConnection
    if named.has_tls:
        kind = type(kind.__name__, (kind, redis.SSLConnection), {})
    return SentinelConnectionPool(named.service, asked, connection_class=kind, **options | named.options)  # type: ignore[no-untyped-call]


class Backoff:
    """Growing pauses while Redis can't serve, a warning every WARN_EVERY_S, and the problem in words."""

    def __init__(self) -> None:
        self.problem = ""  # the error that is retried now; empty: none
        self._delay_s = FIRST_RETRY_S
        # monotonic, s: the last failure, the last warning
        self.failed_at = self._warned_at = float("-inf")

    def failed(self, error: BaseException) -> float:
        """Seconds to wait before the next try."""
        self.problem = f"{type(error).__name__}: {reason_of(error)}"[:200]
        delay_s, self._delay_s, self.failed_at = (
            self._delay_s,
            min(self._delay_s * 2, LONGEST_RETRY_S),
            time.monotonic(),
        )
        if self.failed_at - self._warned_at > WARN_EVERY_S:
            self._warned_at = self.failed_at
            log.warning("redis can't serve, trying again", error=self.problem)
        return delay_s * random.uniform(0.5, 1.0)

    def succeeded(self) -> None:
        if self.problem:
            log.info("redis serves again")
            self.problem, self._delay_s, self._warned_at = "", FIRST_RETRY_S, float("-inf")


class Transport:
    """One connection to Redis, and the patience to get it back."""

    def __init__(self, url: str, stopping: threading.Event, timeout_s: float = REPLY_TIMEOUT_S) -> None:
        """timeout_s: for a reply, in addition to the time that a read may block. A command that is sent
        again may have been done before: every write here is safe to repeat."""
        self.client = connect(url, timeout_s)
        self._line = RedisConnection(self.client)
        self.stopping = stopping
        # each creates a group of a stream, for a Redis that comes back without it
        self.groups: list[Callable[[], None]] = []
        self.backoff = Backoff()

    @property
    def problem(self) -> str:
        return self.backoff.problem

    def persist(self, operation: Callable[[], T]) -> T:
        """Call operation until Redis serves it, with growing pauses. Raises Recoverable if `stopping` is
        set meanwhile."""
        while True:
            try:
                result = operation()
            except (redis.RedisError, OSError) as error:
                self.wait_out(error)
                continue
            self.backoff.succeeded()
            return result

    def wait_out(self, error: Exception) -> None:
        """Pause after a temporary error, and create the groups again that Redis has lost. Raises the
        error if it is not temporary, Recoverable if `stopping` is set."""
        if not is_temporary(error):
            raise error
        if self.stopping.wait(self.backoff.failed(error)):
            raise Recoverable("stopped while Redis could not serve") from error
        if NO_GROUP.search(reason_of(error)):
            for create_group in self.groups:
                try:
                    create_group()
                except (redis.RedisError, OSError) as again:
                    if not is_temporary(again):
                        raise

    def run(self, fill: Callable[[Pipeline], None], *, atomic: bool = False) -> list[Any]:
        """The replies to the commands that `fill` queues, in one round trip. On a temporary error
        all of them are sent again."""

        def attempt() -> list[Any]:
            try:
                self._line.send(fill)
                return self._line.receive()
            except BaseException:
                self._line.close()  # replies may still come on it
                raise

        def attempt_all_or_nothing() -> list[Any]:
            pipe = self.client.pipeline(transaction=True)
            fill(pipe)
            replies: list[Any] = pipe.execute()
            return replies

        return self.persist(attempt_all_or_nothing if atomic else attempt)

    def close(self) -> None:
        """Close the connections. The next use connects again."""
        self._line.close()
        self.client.close()

    def wait_until_up(self, timeout_s: float) -> None:
        """Return once Redis answers. Raises StartupError after timeout_s."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.client.ping()
                return
            except (redis.RedisError, OSError) as error:
                if not is_temporary(error):
                    raise StartupError(refusal_of(error)) from None
                if time.monotonic() > deadline:
                    raise StartupError(f"Redis does not answer: {words_of(error)}") from None
                time.sleep(FIRST_RETRY_S)
