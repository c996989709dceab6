"""Redis, for asyncio."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import redis
import redis.asyncio
from redis.asyncio import BlockingConnectionPool
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool, SentinelManagedConnection
from redis.backoff import NoBackoff

from shared.process.errors import Recoverable
from shared.process.stage_settings import StageSettings
from shared.wire.cells import MOVED, UNREACHABLE, Nodes, in_cell
from shared.wire.line import DENIED, REPLY_TIMEOUT_S, reason_of
from shared.wire.redis_urls import parse_named
from shared.wire.transport import Backoff, is_temporary

T = TypeVar("T")

MAX_CONNECTIONS = 64
BLOCK_S = 1.0  # that a read may block at most
CONNECTION_TIMEOUT_S = 10.0  # for one of the connections to be free


class Cancellable(AbstractConnection):
    """A connection whose user can be cancelled at any time.

    redis-py sends under asyncio.wait_for, and in Python 3.11 that swallows a cancellation which
    comes just when the command has been sent: the task would run on, and the caller that waits for its end
    would wait for ever. asyncio.timeout swallows none.
    """

    async def send_packed_command(self, *args: Any, **kwargs: Any) -> None:
        timeout_s, self.socket_timeout = self.socket_timeout, None
        try:
            async with asyncio.timeout(timeout_s):
                await super().send_packed_command(*args, **kwargs)
        except TimeoutError:
            raise redis.TimeoutError("Timeout writing to socket") from None
        finally:
            self.socket_timeout = timeout_s


class PrimaryPool(BlockingConnectionPool, SentinelConnectionPool):
    """Connections to the primary that Sentinels or a cluster's nodes name, of which a command waits for one."""


class AsyncNodes(Nodes):
    """Nodes, asked without blocking."""

    async def discover_master(self, _: str) -> tuple[str, int]:  # type: ignore[override]
        for address in tuple(self.addresses):
            try:
                async with redis.asyncio.Redis(
                    host=address[0], port=address[1], retry=Retry(NoBackoff(), 0), **self.named.own_options
                ) as node:
                    slots = await node.execute_command("CLUSTER SLOTS")  # type: ignore[no-untyped-call]
            except DENIED:
                raise
            except UNREACHABLE as error:
                self.reason = reason_of(error)
                continue
            if (primary := self.learn(address, slots)) is not None:
                return primary
        raise self.not_found


class AsyncCellConnection(SentinelManagedConnection):
    """A connection to the primary of a cell, for commands that know nothing of the cell."""

    def pack_command(self, *arguments: Any) -> list[bytes]:
        return super().pack_command(*in_cell(self.connection_pool.sentinel_manager.named.prefix, arguments))

    async def connect_to(self, address: tuple[str, int]) -> None:
        try:
            await super().connect_to(address)  # type: ignore[no-untyped-call]
        except UNREACHABLE:
            self.connection_pool.sentinel_manager.was_wrong()
            raise

    async def read_response(self, *arguments: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*arguments, **options)
        except MOVED:
            self.connection_pool.sentinel_manager.was_wrong()
            await self.disconnect()
            raise redis.ConnectionError("the cell has moved to another server") from None


def connect(settings: StageSettings, max_connections: int = MAX_CONNECTIONS) -> "redis.asyncio.Redis":
    """A client whose commands wait for one of so many connections. (redis-py's own pool refuses a
    command when all are taken: by default the 101st at once.)"""
    options: dict[str, Any] = {
        "max_connections": max_connections,
        "timeout": CONNECTION_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
        "socket_connect_timeout": 5,
        "socket_timeout": BLOCK_S + REPLY_TIMEOUT_S,
    }
    if (named := parse_named(settings.redis_url)) is not None:
        asked = (
            AsyncNodes(named)
            if named.cell
            else Sentinel(named.addresses, sentinel_kwargs=named.own_options | {"retry": Retry(NoBackoff(), 0)})  # type: ignore[no-untyped-call]
        )
        kinds: tuple[type, ...] = (
            AsyncCellConnection if named.cell else SentinelManagedConnection,
            *([redis.asyncio.SSLConnection] if named.has_tls else []),
        )
        pool: BlockingConnectionPool = PrimaryPool(
            service_name=named.service, sentinel_manager=asked, **options | named.options
        )
    else:
        pool = BlockingConnectionPool.from_url(settings.redis_url, **options)
        kinds = (pool.connection_class,)  # of the URL's scheme
    pool.connection_class = type(kinds[0].__name__, (Cancellable, *kinds), {})
    return redis.asyncio.Redis.from_pool(pool)


class OwnConnection:
    """A connection for one task that asks again and again. A client's own command takes one from
    its pool, and has a clock, a lock and a dozen functions around it: more than the reading of an
    answer costs."""

    def __init__(self, client: "redis.asyncio.Redis") -> None:
        pool: Any = client.connection_pool
        self._connection: Any = pool.make_connection()
        self._callbacks: Any = client.response_callbacks

    async def ask(self, *command: Any) -> Any:
        """The reply to the command, as the client would give it. Raises what redis-py raises; the
        next call connects again."""
        try:
            if not self._connection.is_connected:
                await self._connection.connect()
            await self._connection.send_command(*command, check_health=False)
            reply = await self._connection.read_response()
        except redis.ResponseError:
            raise
        except BaseException:  # a reply may still come that is none to the next command
            await self._connection.disconnect(nowait=True)
            raise
        callback = self._callbacks.get(command[0])
        return reply if callback is None or reply is None else callback(reply)

    async def close(self) -> None:
        await self._connection.disconnect()


@contextmanager
def redis_errors_as_503() -> Iterator[None]:
    """Turn what a Redis that can't serve raises into Recoverable, which is a 503 with Retry-After.
    Lets what is no passing trouble through."""
    try:
        yield
    except (redis.RedisError, OSError) as error:
        if not is_temporary(error):
            raise
        raise Recoverable(reason_of(error)) from error


async def persist(operation: Callable[[], Awaitable[T]], backoff: Backoff | None = None) -> T:
    """operation(), again and again with growing pauses while Redis can't serve. What is not
    temporary is raised. backoff: the caller's, which shows the problem; by default one of its own."""
    backoff = backoff or Backoff()
    while True:
        try:
            result = await operation()
        except (redis.RedisError, OSError, Recoverable) as error:
            if not (isinstance(error, Recoverable) or is_temporary(error)):
                raise
            await asyncio.sleep(backoff.failed(error))
            continue
        backoff.succeeded()
        return result
