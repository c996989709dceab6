"""Moving messages over Redis Streams: append, read, claim, acknowledge, trim, and waiting for Redis to come back.

Knows streams and bytes; what a message means is its reader's business. Synchronous, for the stages whose loop is a thread; the
gateway, which is asyncio, has its own reader in services/gateway/subscriptions.py.
"""

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from shared.errors import Invalid, Recoverable, StartupError
from shared.messages import decode, encode
from shared.streams import DEAD_LETTER, GATEWAY_ID, MAX_DEAD_LETTERS, MESSAGE, REPLICA_STREAM_TTL_S, REQUEST_ID, DirectStream, GroupStream
from shared.telemetry import get_logger

log = get_logger("penstock.transport")

T = TypeVar("T")
Pipeline = Any  # redis-py's pipelines type every command as maybe-awaitable, which says nothing here

AWAY = (redis.ConnectionError, redis.TimeoutError)  # includes "loading its data", after a restart
FIRST_RETRY_S, LONGEST_RETRY_S = 0.05, 2.0
MAX_DELIVERIES = 5
RELEASED_MS = 24 * 3600 * 1000  # an idle time beyond any lease


def connect(url: str) -> "redis.Redis":
    """A client with hiredis underneath. Retrying is `Transport.persist`'s, so that it can be interrupted."""
    try:
        return redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), socket_connect_timeout=5, socket_timeout=60)
    except ValueError as error:
        raise StartupError(f"PENSTOCK_REDIS_URL is not a Redis URL: {error}") from None


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message handed to this consumer. It is pending until `GroupReader.finish`."""

    entry_id: bytes
    message: Any
    was_claimed: bool  # another consumer had it before: work may have been done


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that no one could handle, and whom to tell. Still pending until `GroupReader.finish`."""

    entry_id: bytes
    request_id: str
    gateway_id: str | None
    reason: str


class Transport:
    """One connection to Redis, and the patience to get it back."""

    def __init__(self, url: str, stopping: threading.Event) -> None:
        self.client = connect(url)
        self.stopping = stopping

    def persist(self, operation: Callable[[], T]) -> T:
        """operation(), again and again with growing pauses while Redis is away. Raises Recoverable if told to stop meanwhile."""
        delay_s = FIRST_RETRY_S
        while True:
            try:
                return operation()
            except AWAY as error:
                log.warning("redis is away, trying again", retry_in_s=round(delay_s, 2), error=error)
                if self.stopping.wait(delay_s * random.uniform(0.5, 1.0)):
                    raise Recoverable("stopped while Redis was away") from error
                delay_s = min(delay_s * 2, LONGEST_RETRY_S)

    def run(self, fill: Callable[[Pipeline], None], *, atomic: bool = False) -> list[Any]:
        """The replies to the commands that `fill` queues, in one round trip. On a lost connection all of them are sent again."""

        def attempt() -> list[Any]:
            pipe = self.client.pipeline(transaction=atomic)
            fill(pipe)
            replies: list[Any] = pipe.execute()
            return replies

        return self.persist(attempt)

    def wait_until_up(self, timeout_s: float) -> None:
        """Return once Redis answers. Raises StartupError after timeout_s."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.client.ping()
                return
            except AWAY as error:
                if time.monotonic() > deadline:
                    raise StartupError(f"Redis does not answer: {error}") from None
                time.sleep(FIRST_RETRY_S)
            except redis.RedisError as error:
                raise StartupError(f"Redis refuses: {error}") from None


def append(pipe: Pipeline, stream: DirectStream, message: Any) -> None:
    """Queue the message for the stream's one reader. The stream lives on for a while only, should that reader have died."""
    pipe.xadd(stream.key, {MESSAGE: encode(message)})
    pipe.expire(stream.key, REPLICA_STREAM_TTL_S)


def append_to_group(pipe: Pipeline, stream: GroupStream, message: Any) -> None:
    """Queue a request's message for the stream's consumer group."""
    pipe.xadd(stream.key, {MESSAGE: encode(message), REQUEST_ID: message.request_id, GATEWAY_ID: message.gateway_id or ""})


class DirectReader:
    """Reads a stream that is this replica's alone, in order, and trims it behind itself."""

    def __init__(self, transport: Transport, stream: DirectStream) -> None:
        self.transport = transport
        self.stream = stream
        self.last_id = "0-0"

    def start_at_end(self) -> None:
        """Skip what is there: for a broadcast stream, whose past is not about this replica."""
        latest: Any = self.transport.persist(lambda: self.transport.client.xrevrange(self.stream.key, count=1))
        self.last_id = latest[0][0].decode() if latest else "0-0"

    def take(self, reply: Any) -> list[Any]:
        """This stream's messages in an XREAD reply. What does not decode goes to the dead-letter stream."""
        messages: list[Any] = []
        for entry_id, values in entries_of(reply).get(self.stream.key.encode(), []):
            self.last_id = entry_id.decode()
            try:
                messages.append(decode(self.stream.message_type, values[MESSAGE]))
            except (Invalid, KeyError) as error:
                self.transport.run(partial(write_dead_letter, self.stream.key, values, error, 1))
        return messages

    def trim(self, pipe: Pipeline) -> None:
        """Drop what has been taken."""
        pipe.xtrim(self.stream.key, minid=next_id(self.last_id), approximate=False)


class GroupReader:
    """This replica as one consumer of a group stream."""

    def __init__(self, transport: Transport, stream: GroupStream, consumer: str) -> None:
        self.transport = transport
        self.stream = stream
        self.consumer = consumer

    def ensure_group(self) -> None:
        """Create the stream and its group unless they exist."""

        def create() -> None:
            try:
                self.transport.client.xgroup_create(self.stream.key, self.stream.group, id="0", mkstream=True)
            except redis.ResponseError as error:
                if not str(error).startswith("BUSYGROUP"):
                    raise

        self.transport.persist(create)

    def queue_read(self, pipe: Pipeline, *, count: int, block_ms: int | None = None) -> None:
        """Ask, within a pipeline, for up to count entries that nobody has yet; `take` reads the reply."""
        pipe.xreadgroup(self.stream.group, self.consumer, {self.stream.key: ">"}, count=count, block=block_ms)

    def read(self, *, count: int, block_ms: int) -> tuple[list[Delivery], list[DeadLetter]]:
        """Up to count new entries; waits up to block_ms for the first."""

        def ask() -> Any:
            return self.transport.client.xreadgroup(self.stream.group, self.consumer, {self.stream.key: ">"}, count=count, block=block_ms)

        try:
            return self.take(self.transport.persist(ask))
        except redis.ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise
            self.ensure_group()  # Redis came back empty
            return [], []

    def take(self, reply: Any) -> tuple[list[Delivery], list[DeadLetter]]:
        """The entries of an XREADGROUP reply, first deliveries all."""
        entries = entries_of(reply).get(self.stream.key.encode(), [])
        return self._open(entries, dict.fromkeys((entry_id for entry_id, _ in entries), 1), was_claimed=False)

    def claim(self, *, idle_ms: int, count: int) -> tuple[list[Delivery], list[DeadLetter]]:
        """Take over entries whose consumer has not renewed them for idle_ms; what was delivered too often becomes a dead letter."""

        def ask() -> Any:
            return self.transport.client.xpending_range(self.stream.key, self.stream.group, "-", "+", count, idle=idle_ms)

        try:
            pending = self.transport.persist(ask)
        except redis.ResponseError as error:
            if not str(error).startswith("NOGROUP"):
                raise
            return [], []
        if not pending:
            return [], []
        deliveries = {each["message_id"]: each["times_delivered"] + 1 for each in pending}
        claimed: Any = self.transport.persist(
            lambda: self.transport.client.xclaim(self.stream.key, self.stream.group, self.consumer, idle_ms, list(deliveries))
        )
        return self._open([(entry_id, values) for entry_id, values in claimed if values], deliveries, was_claimed=True)

    def renew(self, pipe: Pipeline, entry_ids: list[bytes]) -> None:
        """Say that these entries are still being worked on."""
        if entry_ids:
            pipe.xclaim(self.stream.key, self.stream.group, self.consumer, 0, entry_ids, justid=True)

    def release(self, pipe: Pipeline, entry_ids: list[bytes]) -> None:
        """Let another consumer claim these entries at once, as if they had not been delivered before."""
        if entry_ids:
            pipe.xclaim(self.stream.key, self.stream.group, self.consumer, 0, entry_ids, idle=RELEASED_MS, retrycount=0, justid=True)

    def finish(self, pipe: Pipeline, entry_ids: list[bytes]) -> None:
        """Their work is done: acknowledge and delete."""
        if entry_ids:
            pipe.xack(self.stream.key, self.stream.group, *entry_ids)
            pipe.xdel(self.stream.key, *entry_ids)

    def leave(self, pipe: Pipeline) -> None:
        """Remove this consumer's name from the group. Only with nothing pending: Redis forgets a deleted consumer's entries."""
        pipe.xgroup_delconsumer(self.stream.key, self.stream.group, self.consumer)

    def _open(
        self, entries: list[tuple[bytes, dict[bytes, bytes]]], num_deliveries: dict[bytes, int], *, was_claimed: bool
    ) -> tuple[list[Delivery], list[DeadLetter]]:
        deliveries, dead = [], []
        for entry_id, values in entries:
            try:
                if num_deliveries[entry_id] > MAX_DELIVERIES:
                    raise Invalid(f"{num_deliveries[entry_id] - 1} replicas in turn took this request up and died or gave up")
                deliveries.append(Delivery(entry_id, decode(self.stream.message_type, values[MESSAGE]), was_claimed))
            except (Invalid, KeyError) as error:
                self.transport.run(partial(write_dead_letter, self.stream.key, values, error, num_deliveries[entry_id]))
                request_id, gateway_id = values.get(REQUEST_ID, b"").decode(), values.get(GATEWAY_ID, b"").decode()
                dead.append(DeadLetter(entry_id, request_id, gateway_id or None, str(error)))
        return deliveries, dead


def write_dead_letter(stream_key: str, values: dict[bytes, bytes], error: Exception, num_deliveries: int, pipe: Pipeline) -> None:
    """Keep a message that can't be handled, with the reason, for an operator."""
    log.error("dead letter", stream=stream_key, request_id=values.get(REQUEST_ID, b"").decode(), error=error)
    letter = {"stream": stream_key, "error": str(error) or repr(error), "deliveries": num_deliveries, MESSAGE: values.get(MESSAGE, b"")}
    pipe.xadd(DEAD_LETTER, letter, maxlen=MAX_DEAD_LETTERS, approximate=True)


def entries_of(reply: Any) -> dict[bytes, list[tuple[bytes, dict[bytes, bytes]]]]:
    """An XREAD or XREADGROUP reply as entries by stream; redis-py gives a list under RESP2, a dict under RESP3, None for nothing."""
    if not reply:
        return {}
    if isinstance(reply, dict):
        return {key: [entry for group in groups for entry in group] for key, groups in reply.items()}
    return {key: [(entry_id, values) for entry_id, values in entries] for key, entries in reply}


def next_id(entry_id: str) -> str:
    """The smallest stream ID after entry_id."""
    milliseconds, _, sequence = entry_id.partition("-")
    return f"{milliseconds}-{int(sequence) + 1}"
