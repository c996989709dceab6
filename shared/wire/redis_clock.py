"""Redis' clock may go back. A stream's ids are made of it: they still grow while the stream exists,
but a stream that has expired begins again with older ids.

A reader of the stream waits for newer ids, and would never see these: so readers check now and then
whether it is still the same stream.
"""

from typing import Any

from shared.process.telemetry import get_logger
from shared.wire.entries import DirectReader
from shared.wire.script import load_script
from shared.wire.transport import Transport

log = get_logger("penstock.transport")

NEWEST_IDS = load_script("newest_ids")


def has_begun_again(last_id: str, newest: bytes) -> bool:
    """Whether the stream, whose last id is `newest`, has begun again since last_id was read."""
    return bool(newest) and _order_of(newest.decode()) < _order_of(last_id)


def _order_of(entry_id: str) -> tuple[int, int]:
    milliseconds, _, number = entry_id.partition("-")
    return int(milliseconds), int(number)


def follow_clock(transport: Transport, readers: list[DirectReader]) -> None:
    """Have streams that have begun again read from their beginning."""
    newest: Any = transport.persist(lambda: NEWEST_IDS.call(transport.client, [each.stream.key for each in readers]))
    for reader, entry_id in zip(readers, newest, strict=True):
        if has_begun_again(reader.last_id, entry_id):
            log.warning(
                "a stream has begun again: Redis' clock went back", stream=reader.stream.key, last_id=reader.last_id
            )
            reader.last_id = "0-0"
