"""The token log: one stream a request, the truth about what was decided.

The entry of the token at position p has the ID `p-0`, and an end without a token (cancelled, failed) after p tokens `p-1`. Redis refuses
an ID that is not greater than the last, so appending is idempotent: whoever decides a position first has decided it, and everyone
else reads what was decided. A step is written by one script, in this order: the logs, then the events, then the decisions. What
compute acts on is already durable.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from shared.messages import RequestError, StepEvents, TokenEvent, decode, encode
from shared.streams import LOG_TTL_S, MESSAGE, REPLICA_STREAM_TTL_S, RUNNING_LOG_TTL_S, DirectStream, events, log_key
from shared.transport import Pipeline

# ARGV[1]: msgpack of [[[log key, entry id, event, ttl or 0], …], [[stream key, message], …]]. One packed argument, because hundreds of
# commands a step cost the client more than the whole decision. Returns the (1-based) entries whose position was already decided; if
# there are any, no message is sent.
WRITE_STEP = f"""
local step = cmsgpack.unpack(ARGV[1])
local refused = {{}}
for i, entry in ipairs(step[1]) do
  local reply = redis.pcall('XADD', entry[1], entry[2], '{MESSAGE.decode()}', entry[3])
  if type(reply) == 'table' and reply['err'] then
    refused[#refused + 1] = i
  elseif entry[4] > 0 then
    redis.call('EXPIRE', entry[1], entry[4])
  end
end
if #refused == 0 then
  for _, message in ipairs(step[2]) do
    redis.call('XADD', message[1], '*', '{MESSAGE.decode()}', message[2])
    redis.call('EXPIRE', message[1], {REPLICA_STREAM_TTL_S})
  end
end
return refused
"""


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A TokenEvent on its way to the log."""

    event: TokenEvent
    payload: bytes  # the event, encoded once for the log and the gateway

    @property
    def entry_id(self) -> str:
        return f"{self.event.position}-{0 if self.event.token_id is not None else 1}"


def log_entry(event: TokenEvent) -> LogEntry:
    return LogEntry(event, encode(event))


def write_step(pipe: Pipeline, entries: Sequence[LogEntry], messages: Sequence[tuple[DirectStream, Any]]) -> None:
    """Queue one step: append the entries to their logs and, unless one of them is refused, send the messages in order."""
    logs = [[log_key(entry.event.request_id), entry.entry_id, entry.payload, _ttl(entry.event)] for entry in entries]
    # Lua's cmsgpack knows msgpack's old raw type only, which holds bytes and text alike
    packed = msgpack.packb([logs, [[stream.key, encode(message)] for stream, message in messages]], use_bin_type=False)
    pipe.eval(WRITE_STEP, 0, packed)


def _ttl(event: TokenEvent) -> int:
    if event.finish_reason is not None:
        return LOG_TTL_S
    return RUNNING_LOG_TTL_S if event.position == 1 else 0


def read_log(client: Any, request_id: str, after_position: int = 0) -> list[TokenEvent]:
    """The events after a position, in order, up to the request's end."""
    found = []
    for _, values in client.xrange(log_key(request_id), min=f"({after_position}-0" if after_position else "-"):
        event = decode(TokenEvent, values[MESSAGE])
        found.append(event)
        if event.finish_reason is not None:
            break
    return found


def read_entry(client: Any, request_id: str, entry_id: str) -> TokenEvent | None:
    """What the log holds under an ID."""
    found = client.xrange(log_key(request_id), min=entry_id, max=entry_id)
    return decode(TokenEvent, found[0][1][MESSAGE]) if found else None


def end_request(
    pipe: Pipeline, request_id: str, gateway_id: str | None, *, position: int = 0, error: RequestError | None = None, num_prompt_tokens: int = 0
) -> None:
    """End a request that will get no more tokens: with `error`, or as cancelled without one. Safe to repeat."""
    event = TokenEvent(request_id, position, None, "", num_prompt_tokens=num_prompt_tokens, finish_reason="error" if error else "cancelled", error=error)
    entry = log_entry(event)
    write_step(pipe, [entry], [(events(gateway_id), StepEvents((entry.payload,)))] if gateway_id else [])
