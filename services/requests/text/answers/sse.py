"""Server-sent events: bytes of a chunk, of a ping, of the end; and the event id, which is a place
in the token logs.

The id of an event is the position of each of the response's sequences after it, joined by commas:
`17`, or `17,12` with n=2. A client that reconnects sends it back as Last-Event-ID.
"""

import re
from typing import Any

import orjson

from shared.process.errors import Invalid

POSITION = re.compile(r"[0-9]{1,10}")
DONE = b"data: [DONE]\n\n"
# Blank lines: many clients cut the stream there, and drop or fail at a block that a comment begins.
PING = b"\n\n"
# Where events have ids: many clients take a blank line for an event once they have seen one.
PING_AMONG_IDS = b": waiting\n"
# In their place while a replica is being started, for as long as the operator lets a request wait.
STARTING = {PING: b": starting\n\n", PING_AMONG_IDS: b": starting\n"}


def encode_event(payload: dict[str, Any], event_id: str | None = None) -> bytes:
    return event_head(event_id) + orjson.dumps(payload) + b"\n\n"


def event_head(event_id: str | None) -> bytes:
    """The bytes before an event's data, which a blank line ends."""
    return b"data: " if event_id is None else b"id: %b\ndata: " % event_id.encode()


def format_id(positions: list[int]) -> str | None:
    """Write an event id. None before the first token: a client that comes back from there begins
    again."""
    return ",".join(map(str, positions)) if any(positions) else None


def parse_id(text: str, num_sequences: int) -> list[int]:
    """The positions in a Last-Event-ID. Raises Invalid."""
    parts = text.split(",")
    if len(parts) != num_sequences or not all(POSITION.fullmatch(part) for part in parts):
        raise Invalid(
            f"Last-Event-ID must be {num_sequences} positions joined by commas, got {text[:64]!r}",
            param="Last-Event-ID",
        )
    return [int(part) for part in parts]
