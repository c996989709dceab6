"""Entries of Redis Streams: append, read, claim, acknowledge, trim.

Knows streams and bytes; what a message means is its reader's business. Synchronous, for the stages
whose loop is a thread; the gateway, which is asyncio, has its own reader in
services/gateway/generation/subscriptions.py.
"""

import time
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import redis

from shared.process.errors import Invalid
from shared.process.telemetry import get_logger
from shared.wire.cells import without_cell
from shared.wire.line import Pipeline
from shared.wire.messages import decode, encode
from shared.wire.script import load_script
from shared.wire.streams import (
    DEAD_LETTER,
    GATEWAY_ID,
    MAX_DEAD_LETTERS,
    MESSAGE,
    REPLICA_STREAM_TTL_S,
    REQUEST_ID,
    DirectStream,
    GroupStream,
)
from shared.wire.transport import Transport

log = get_logger("penstock.transport")

RELEASED_MS = 24 * 3600 * 1000  # an idle time beyond any lease
CLAIM_WINDOW = 64  # pending entries that are looked at for those delivered least often
TRIM_EVERY_S = 0.5  # of a stream that one replica reads
FORGET_CONSUMER_MS = 60_000  # of a consumer that is not alive and has nothing pending
FORGET_CONSUMERS, LEAVE_GROUP = load_script("forget_consumers"), load_script("leave_group")
RENEW_ENTRIES, TAKEN_OVER = load_script("renew_entries"), load_script("taken_over")


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message handed to this consumer. It is pending until `GroupReader.finish`."""

    entry_id: bytes
    message: Any
    was_claimed: bool  # another consumer had it before: work may have been done
    was_released: bool = False  # and handed it on in good order


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that no replica could handle, and the gateway that waits for it. Still pending
    until `GroupReader.finish`."""

    entry_id: bytes
    request_id: str
    gateway_id: str | None
    reason: str


def append(pipe: Pipeline, stream: DirectStream, message: Any) -> None:
    """Queue the message for the stream's one reader. The stream expires if that reader has died."""
    pipe.xadd(stream.key, {MESSAGE: encode(message)})
    pipe.expire(stream.key, REPLICA_STREAM_TTL_S)


def append_to_group(pipe: Pipeline, stream: GroupStream, message: Any) -> None:
    """Queue a request's message for the stream's consumer group."""
    pipe.xadd(
        stream.key, {MESSAGE: encode(message), REQUEST_ID: message.request_id, GATEWAY_ID: message.gateway_id or ""}
    )


class DirectReader:
    """Reads a stream that is this replica's alone, in order, and trims it behind itself."""

    def __init__(self, transport: Transport, stream: DirectStream) -> None:
        self.transport = transport
        self.stream = stream
        self.last_id = "0-0"
        self._trimmed_at = 0.0

    def start_at_end(self) -> None:
        """Skip what is there: for a broadcast stream, whose past is not about this replica."""
        latest: Any = self.transport.persist(lambda: self.transport.client.xrevrange(self.stream.key, count=1))
        self.last_id = latest[0][0].decode() if latest else "0-0"

    def take(self, reply: Any) -> list[Any]:
        """The stream's messages in an XREAD reply. What does not decode goes to the dead-letter
        stream."""
        messages: list[Any] = []
        for entry_id, values in entries_of(reply).get(self.stream.key.encode(), []):
            self.last_id = entry_id.decode()
            try:
                messages.append(decode(self.stream.message_type, values[MESSAGE]))
            except (Invalid, KeyError) as error:
                self.transport.run(partial(write_dead_letter, self.stream.key, values, error, 1))
        return messages

    def trim_now_and_then(self, pipe: Pipeline) -> None:
        """Drop the entries that were taken, once in TRIM_EVERY_S: with every read it would cost a
        command a step."""
        if time.monotonic() - self._trimmed_at > TRIM_EVERY_S:
            self._trimmed_at = time.monotonic()
            pipe.xtrim(self.stream.key, minid=next_id(self.last_id), approximate=False)


class GroupReader:
    """This replica as one consumer of a group stream."""

    def __init__(self, transport: Transport, stream: GroupStream, consumer: str) -> None:
        self.transport = transport
        self.stream = stream
        self.consumer = consumer
        transport.groups.append(self.create_group)

    def ensure_group(self) -> None:
        """Create the stream and its group unless they exist."""
        self.transport.persist(self.create_group)

    def create_group(self) -> None:
        try:
            self.transport.client.xgroup_create(self.stream.key, self.stream.group, id="0", mkstream=True)
        except redis.ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):
                raise

    def queue_read(self, pipe: Pipeline, *, count: int, block_ms: int | None = None) -> None:
        """Ask, within a pipeline, for up to count entries that no consumer has yet; `take` reads the
        reply."""
        pipe.xreadgroup(self.stream.group, self.consumer, {self.stream.key: ">"}, count=count, block=block_ms)

    def read(self, *, count: int, block_ms: int) -> tuple[list[Delivery], list[DeadLetter]]:
        """Up to count new entries; waits up to block_ms for the first."""
        return self.take(self.transport.run(lambda pipe: self.queue_read(pipe, count=count, block_ms=block_ms))[0])

    def take(self, reply: Any) -> tuple[list[Delivery], list[DeadLetter]]:
        """The entries of an XREADGROUP reply, first deliveries all."""
        return self.open_fresh(entries_of(reply).get(self.stream.key.encode(), []))

    def open_fresh(self, entries: list[tuple[bytes, dict[bytes, bytes]]]) -> tuple[list[Delivery], list[DeadLetter]]:
        """Entries that no replica has begun."""
        return self._open(entries, dict.fromkeys((entry_id for entry_id, _ in entries), 1), was_claimed=False)

    def claim(
        self, *, idle_ms: int, count: int, max_deliveries: int | None = None, besides: Collection[bytes] = ()
    ) -> tuple[list[Delivery], list[DeadLetter]]:
        """Take over up to count entries whose consumer has not renewed them for idle_ms, those
        first that were delivered least often. besides: entries that stay where they are.

        An entry that was delivered more than max_deliveries times becomes a dead letter.
        """
        pending: Any = self.transport.persist(
            lambda: self.transport.client.xpending_range(
                self.stream.key, self.stream.group, "-", "+", max(count, CLAIM_WINDOW) + len(besides), idle=idle_ms
            )
        )
        chosen = sorted(
            (each for each in pending if each["message_id"] not in besides), key=lambda each: each["times_delivered"]
        )[:count]
        if not chosen:
            return [], []
        deliveries = {each["message_id"]: each["times_delivered"] + 1 for each in chosen}
        claimed: Any = self.transport.persist(
            lambda: self.transport.client.xclaim(
                self.stream.key, self.stream.group, self.consumer, idle_ms, list(deliveries)
            )
        )
        return self._open(
            [(entry_id, values) for entry_id, values in claimed if values],
            deliveries,
            was_claimed=True,
            max_deliveries=max_deliveries,
        )

    def forget_consumers(self, live: set[str]) -> None:
        """Remove the names of consumers that are dead and have nothing pending."""
        keys, client, stays = [self.stream.key], self.transport.client, (self.consumer, *live)
        self.transport.persist(
            lambda: FORGET_CONSUMERS.call(client, keys, self.stream.group, FORGET_CONSUMER_MS, *stays)
        )

    def renew(self, pipe: Pipeline, entry_ids: Collection[bytes]) -> None:
        """Say that these entries are still being worked on, as far as they are still this
        consumer's."""
        if entry_ids:
            RENEW_ENTRIES.call(pipe, [self.stream.key], self.stream.group, self.consumer, *entry_ids)

    def taken_over(self, entry_ids: list[bytes]) -> list[bytes]:
        """The entries among these that another consumer has claimed: this one was silent for too
        long."""
        if not entry_ids:
            return []
        keys, client, group = [self.stream.key], self.transport.client, self.stream.group
        taken: Any = self.transport.persist(lambda: TAKEN_OVER.call(client, keys, group, self.consumer, *entry_ids))
        return list(taken)

    def release(self, pipe: Pipeline, entry_ids: list[bytes], *, num_deliveries: int = 0) -> None:
        """Let another consumer claim these entries at once. num_deliveries: how often they count as
        delivered before; 0 if this consumer hands them on in good order."""
        if entry_ids:
            pipe.xclaim(
                self.stream.key,
                self.stream.group,
                self.consumer,
                0,
                entry_ids,
                idle=RELEASED_MS,
                retrycount=num_deliveries,
                justid=True,
            )

    def release_all(self) -> None:
        """Release whatever is pending with this consumer; if nothing is, remove its name."""
        after, has_pending = "-", False
        while True:
            pending: Any = self.transport.persist(
                lambda: self.transport.client.xpending_range(
                    self.stream.key,
                    self.stream.group,
                    after,  # noqa: B023
                    "+",
                    CLAIM_WINDOW,
                    consumername=self.consumer,  # noqa: B023, RUF100
                )
            )
            if not pending:
                break
            # what was released before keeps how often it was delivered
            held = [each["message_id"] for each in pending if each["time_since_delivered"] < RELEASED_MS]
            after, has_pending = "(" + pending[-1]["message_id"].decode(), True
            self.transport.run(lambda pipe: self.release(pipe, held))  # noqa: B023
        if not has_pending:
            self.transport.run(self.leave)

    def finish(self, pipe: Pipeline, entry_ids: list[bytes]) -> None:
        """Acknowledge and delete entries whose work is done."""
        if entry_ids:
            pipe.xack(self.stream.key, self.stream.group, *entry_ids)
            pipe.xdel(self.stream.key, *entry_ids)

    def leave(self, pipe: Pipeline) -> None:
        """Remove this consumer's name from the group, if nothing is pending with it."""
        LEAVE_GROUP.call(pipe, [self.stream.key], self.stream.group, self.consumer)

    def _open(
        self,
        entries: list[tuple[bytes, dict[bytes, bytes]]],
        num_deliveries: dict[bytes, int],
        *,
        was_claimed: bool,
        max_deliveries: int | None = None,
    ) -> tuple[list[Delivery], list[DeadLetter]]:
        deliveries, dead = [], []
        for entry_id, values in entries:
            try:
                if max_deliveries is not None and num_deliveries[entry_id] > max_deliveries:
                    raise Invalid(
                        f"{num_deliveries[entry_id] - 1} replicas in turn took this request up and died or gave up"
                    )
                deliveries.append(
                    Delivery(
                        entry_id,
                        decode(self.stream.message_type, values[MESSAGE]),
                        was_claimed,
                        was_claimed and num_deliveries[entry_id] == 1,
                    )
                )
            except (Invalid, KeyError) as error:
                self.transport.run(partial(write_dead_letter, self.stream.key, values, error, num_deliveries[entry_id]))
                dead.append(
                    DeadLetter(entry_id, _text(values, REQUEST_ID), _text(values, GATEWAY_ID) or None, str(error))
                )
        return deliveries, dead


def _text(values: dict[bytes, bytes], name: bytes) -> str:
    """A field in the clear, whatever its bytes."""
    return values.get(name, b"").decode(errors="replace")


def write_dead_letter(
    stream_key: str, values: dict[bytes, bytes], error: Exception, num_deliveries: int, pipe: Pipeline
) -> None:
    """Keep a message that can't be handled, with the reason, for an operator."""
    log.error("dead letter", stream=stream_key, request_id=_text(values, REQUEST_ID), error=error)
    letter = {
        "stream": stream_key,
        "error": str(error) or repr(error),
        "deliveries": num_deliveries,
        MESSAGE: values.get(MESSAGE, b""),
    }
    pipe.xadd(DEAD_LETTER, letter, maxlen=MAX_DEAD_LETTERS, approximate=True)


def entries_of(reply: Any) -> dict[bytes, list[tuple[bytes, dict[bytes, bytes]]]]:
    """An XREAD or XREADGROUP reply as entries by stream; redis-py gives a list under RESP2, a dict
    under RESP3, None for nothing."""
    if not reply:
        return {}
    if isinstance(reply, dict):
        return {without_cell(key): [entry for group in groups for entry in group] for key, groups in reply.items()}
    return {without_cell(key): [(entry_id, values) for entry_id, values in entries] for key, entries in reply}


def next_id(entry_id: str) -> str:
    """The smallest stream ID after entry_id."""
    milliseconds, _, sequence = entry_id.partition("-")
    return f"{milliseconds}-{int(sequence) + 1}"
