"""Offers: prompts that are delivered to a compute replica by choice, because it has their prefix.

An offered prompt stands in the stream of all prompts, and is pending with the chosen replica like
any that it read itself: so it is claimed from a dead replica, and a replica is blamed for it, as any
other. A hint says from when on it is better to compute the prefix again than to wait for that replica
any longer. Then any replica may steal it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shared.wire.entries import DeadLetter, Delivery, GroupReader, append_to_group
from shared.wire.line import Pipeline
from shared.wire.messages import TAGS, Offer, TokenizedRequest
from shared.wire.script import load_script, table
from shared.wire.streams import GroupStream, offered, offers_key, replica_key

DELIVER, TAKE_UP, STEAL = load_script("deliver"), load_script("take_up"), load_script("steal")


def offer(pipe: Pipeline, stream: GroupStream, message: TokenizedRequest, compute_id: str, wait_ms: int) -> None:
    """Queue the message for that replica, if it lives; others may take it after wait_ms. Behind
    entries that no replica has read yet, it waits like these, for any replica.

    The message is appended by a command of its own: in a transaction that a full Redis refuses,
    nothing is done. Delivering it may fail, and then it is like any other.
    """
    append_to_group(pipe, stream, message)
    keys = (stream.key, offers_key(message.model), offered(compute_id).key)
    asked = table(
        group=stream.group,
        replica=compute_id,
        announcement=replica_key("compute", compute_id),
        wait_ms=wait_ms,
        tag=TAGS[Offer][0],
        version=TAGS[Offer][1],
    )
    DELIVER.call(pipe, keys, asked)


def take_up(reader: GroupReader, model: str, entry_ids: Sequence[str]) -> tuple[list[Delivery], list[DeadLetter]]:
    """The reader's entries among these that no other replica has stolen: from now on none does."""
    keys, group = [reader.stream.key, offers_key(model)], reader.stream.group
    entries: Any = reader.transport.run(lambda pipe: TAKE_UP.call(pipe, keys, group, reader.consumer, *entry_ids))[0]
    return reader.open_fresh(entries_of_script(entries))


@dataclass(frozen=True, slots=True)
class Loot:
    """Entries that waited for too long."""

    deliveries: list[Delivery]
    dead: list[DeadLetter]
    num_stolen: int  # of them, from other replicas


def steal(reader: GroupReader, model: str, count: int) -> Loot:
    """Up to count entries that were offered to any replica and not taken up in time."""
    keys, group = [reader.stream.key, offers_key(model)], reader.stream.group
    reply: Any = reader.transport.run(lambda pipe: STEAL.call(pipe, keys, group, reader.consumer, count))
    entries, num_stolen = reply[0]
    return Loot(*reader.open_fresh(entries_of_script(entries)), num_stolen)


def entries_of_script(found: list[tuple[bytes, list[bytes]]]) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Entries as a script returns them, with their fields and values in turns."""
    return [(entry_id, dict(zip(values[::2], values[1::2], strict=True))) for entry_id, values in found]
