"""The token log: one stream a request, the truth about what was decided.

The entry of the token at position p has the ID `p-0`, and an end without a token (cancelled,
failed, none asked) after p tokens `p-1`. Two scripts write a log, write_step.lua and write_end.lua,
and they keep three rules: a token follows the one before it (no gap), a position is decided once
(the second writer gets what the log holds), and nothing follows an end. An entry that ends its
request carries the field `e`.

A step is written by one script, in this order: the logs, then the events, then the decisions. What
compute acts on is already durable.

The position of an end without a token is the log's, which its writer does not know: so it stands in
the entry's ID, and beside the event in the stream of events. Readers take it from there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from shared.process.errors import Invalid, Lost
from shared.wire.line import Pipeline
from shared.wire.messages import FinishReason, Moments, RequestError, StepEvents, TokenEvent, decode, encode
from shared.wire.script import load_script, packed, table
from shared.wire.streams import (
    END_EVENT,
    END_POSITION,
    MESSAGE,
    DirectStream,
    GroupStream,
    inflight_key,
    log_key,
    reader_key,
    response_of,
)

END = b"e"  # the field of an entry after which nothing follows
WRITE_STEP, WRITE_END, FINISH_ENDED = load_script("write_step"), load_script("write_end"), load_script("finish_ended")
FIND_WAITING, END_WAITING = load_script("find_waiting"), load_script("end_waiting")


def write_step(
    pipe: Pipeline,
    model: str,
    entries: Sequence[tuple[TokenEvent, bytes]],
    messages: Sequence[tuple[DirectStream, Any]],
) -> None:
    """Queue one step: append the entries, each an event and its encoding, to their logs and, unless one of
    them is refused, send the messages in order. write_step.lua says what is returned."""
    logs = [[event.request_id, event.position, payload, event.finish_reason is not None] for event, payload in entries]
    sent = [[stream.key, encode(message)] for stream, message in messages]
    WRITE_STEP.call(pipe, [inflight_key(model)], packed([logs, sent]))


def end_request(
    pipe: Pipeline,
    model: str,
    request_id: str,
    gateway_id: str | None,
    *,
    error: RequestError | None = None,
    num_prompt_tokens: int = 0,
) -> None:
    """End a request that will get no more tokens: with `error`, or as cancelled without one. A log
    that has an end keeps it. Safe to repeat."""
    reason: FinishReason = "error" if error else "cancelled"
    write_end(
        pipe,
        model,
        TokenEvent(request_id, 0, None, "", num_prompt_tokens=num_prompt_tokens, finish_reason=reason, error=error),
        gateway_id,
    )


def write_end(
    pipe: Pipeline, model: str, event: TokenEvent, gateway_id: str | None, moments: tuple[Moments, ...] = ()
) -> None:
    """Queue an end without a token. Its position is the log's, whatever the event says. A log that
    has an end keeps it. Safe to repeat.

    gateway_id: reads the response, if no other has resumed it; None: none does. moments: for that
    gateway.
    """
    asked = table(**_end_fields(event, gateway_id))
    WRITE_END.call(pipe, _end_keys(model, event), asked, encode(event), encode(StepEvents((), moments)))


def _end_keys(model: str, event: TokenEvent) -> list[str]:
    return [log_key(event.request_id), inflight_key(model), reader_key(response_of(event.request_id))]


def _end_fields(event: TokenEvent, gateway_id: str | None) -> dict[str, Any]:
    """The fields of an end that ends.lua asks for."""
    is_refused = event.error is not None and 400 <= event.error.status < 500
    return {"request": event.request_id, "gateway": gateway_id or "", "is_refused": is_refused}


def queue_find_waiting(pipe: Pipeline, stream: GroupStream, min_age_ms: int, count: int) -> None:
    """Ask for the first entries that no replica has taken for min_age_ms. find_waiting.lua says what
    is returned."""
    FIND_WAITING.call(pipe, [stream.key], stream.group, min_age_ms, count)


def end_waiting(
    pipe: Pipeline,
    stream: GroupStream,
    consumer: str,
    entry_id: bytes,
    model: str,
    event: TokenEvent,
    gateway_id: str | None,
) -> None:
    """Queue the end of a request that no replica has taken yet; entries in their order. Nothing
    happens if one has."""
    asked = table(**_end_fields(event, gateway_id), group=stream.group, consumer=consumer, entry=entry_id)
    END_WAITING.call(pipe, [*_end_keys(model, event), stream.key], asked, encode(event), encode(StepEvents(())))


def finish_ended(pipe: Pipeline, stream: GroupStream, request_by_entry: dict[bytes, str]) -> None:
    """Acknowledge and delete the entries whose requests have ended; leave those whose end is not in
    their logs to be claimed again."""
    if request_by_entry:
        logs = map(log_key, request_by_entry.values())
        FINISH_ENDED.call(pipe, [stream.key, *logs], stream.group, *request_by_entry)


def queue_read(pipe: Pipeline, request_id: str, after_position: int = 0) -> None:
    """Ask, within a pipeline (or of a client), for the log after a position; `parse_log` reads the
    reply."""
    pipe.xrange(log_key(request_id), min=f"({after_position}-0" if after_position else "-")


def queue_entry(pipe: Pipeline, request_id: str, position: int) -> None:
    """Ask, within a pipeline, for the entry of the token at a position."""
    pipe.xrange(log_key(request_id), min=f"{position}-0", max=f"{position}-0")


def parse_log(entries: Any, after_position: int = 0) -> list[TokenEvent]:
    """The events of a log after a position, in order, up to the request's end. Raises Lost for a
    log with a gap, or with what is no event."""
    events: list[TokenEvent] = []
    position = after_position
    for entry_id, values in entries:
        if MESSAGE not in values:
            raise Lost(f"the token log holds what nobody can read at {entry_id.decode()}: no message")
        event = decode_entry(entry_id, values[MESSAGE])
        position += event.token_id is not None
        if event.position != position:
            raise Lost(
                f"the token log has a gap: position {event.position} follows {position - (event.token_id is not None)}"
            )
        events.append(event)
        if event.finish_reason is not None:
            break
    return events


def decode_entry(entry_id: bytes, payload: bytes) -> TokenEvent:
    """The event of an entry. Raises Lost if it is none."""
    try:
        event = decode(TokenEvent, payload)
    except Invalid as error:
        raise Lost(f"the token log holds what nobody can read at {entry_id.decode()}: {error}") from None
    return event if event.token_id is not None else replace(event, position=int(entry_id.partition(b"-")[0]))


def end_of(values: Mapping[bytes, bytes]) -> TokenEvent | None:
    """The end of a request that an entry of a stream of events brings beside its message; None: it
    brings none. Raises Invalid for what is none."""
    if END_EVENT not in values:
        return None
    event, position = decode(TokenEvent, values[END_EVENT]), values.get(END_POSITION, b"")
    if not position.isdigit():
        raise Invalid(f"the position of an end is no number: {position[:20]!r}")
    return replace(event, position=int(position))


def end_alone(event: TokenEvent) -> TokenEvent:
    """The end that an event brings, without its token: its reader has that, or more."""
    return replace(event, token_id=None, text="", logprobs=None, withheld=None, prompt_logprobs=None)
