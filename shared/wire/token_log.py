"""The token log: one stream a request, the truth about what was decided.

The entry of the token at position p has the ID `p-0`, and an end without a token (cancelled,
failed, none asked) after p tokens `p-1`. The scripts here are the only writers, and they keep three
rules: a token follows the one before it (no gap), a position is decided once (whoever comes second
is told what the log holds), and nothing follows an end. An entry that ends its request carries the
field `e`.

A step is written by one script, in this order: the logs, then the events, then the decisions. What
compute acts on is already durable.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
from msgspec.structs import replace

from shared.process.errors import Invalid, Lost
from shared.wire.line import Pipeline
from shared.wire.messages import FinishReason, Moments, RequestError, StepEvents, TokenEvent, decode, encode, encode_around
from shared.wire.streams import (
    GATEWAY_ID,
    LOG_TTL_S,
    MESSAGE,
    PREFIX,
    REPLICA_STREAM_TTL_S,
    REQUEST_ID,
    RUNNING_LOG_TTL_S,
    DirectStream,
    GroupStream,
    events,
    held_bytes_key,
    images_key,
    inflight_key,
    log_key,
    open_key,
    reader_key,
    response_key,
    response_of,
    shares_key,
    stored_key,
)

END = b"e"  # the field of an entry after which nothing follows
TOKENS = " tokens"  # behind a tenant's account, in `shares`: the field of his tokens

# Of what a tenant holds (streams.held_key). A response ends: `release` counts what is left of it,
# which expires with its log, in place of what it held.
RELEASE = f"""
local function release(account, member, left)
  if not redis.call('ZSCORE', account, member) then return end
  local size, id = string.match(member, '^(%d+)/(.*)$')
  local kept = left .. '/' .. id
  local change = left > 0 and left * redis.call('ZADD', account, redis.call('TIME')[1] + {LOG_TTL_S}, kept) or 0
  if kept ~= member then change = change - size * redis.call('ZREM', account, member) end
  redis.call('INCRBY', account .. '{held_bytes_key("")}', change)
end
"""

_COMMON = f"""
{PREFIX}
{RELEASE}
local function last_of(key)
  local last = redis.call('XREVRANGE', key, '+', '-', 'COUNT', 1)[1]
  if not last then return 0, false, nil end
  return tonumber(string.match(last[1], '^%d+')), #last[2] > 2, last[2][2]
end
local function close(response, open, is_refused)
  local account, size, keeps = unpack(redis.call('HMGET', open, 'account', 'size', 'keeps'))
  redis.call('DEL', open)
  redis.call('UNLINK', prefix .. '{images_key("")}' .. response)
  local stored = prefix .. '{stored_key("")}' .. response
  if is_refused and redis.call('STRLEN', stored) > tonumber(keeps) then redis.call('UNLINK', stored) end
  redis.call('EXPIRE', stored, {LOG_TTL_S})
  redis.call('EXPIRE', prefix .. '{response_key("")}' .. response, {LOG_TTL_S})
  redis.call('EXPIRE', prefix .. '{reader_key("")}' .. response, {LOG_TTL_S})
  release(account, size .. '/' .. response, redis.call('STRLEN', stored))
end
local function give_back(shares, account, tokens)
  if not account then return end
  redis.call('HINCRBY', shares, account .. '{TOKENS}', -tokens)
  if redis.call('HINCRBY', shares, account, -1) <= 0 then redis.call('HDEL', shares, account, account .. '{TOKENS}') end
end
local function leave(inflight, request, is_refused)
  local tokens = redis.call('HGET', inflight, request)
  if tokens then
    local shares = prefix .. '{shares_key("")}' .. string.sub(inflight, #prefix + {len(inflight_key("")) + 1})
    local response = string.match(request, '^(.*)%.') or request
    local open = prefix .. '{open_key("")}' .. response
    redis.call('HDEL', inflight, request)
    redis.call('HINCRBY', inflight, '', -tokens)
    give_back(shares, redis.call('HGET', open, 'account'), tokens)
    if redis.call('HLEN', inflight) == 1 then redis.call('DEL', inflight, shares) end
    if redis.call('EXISTS', open) == 1 and redis.call('HINCRBY', open, 'left', -1) <= 0 then close(response, open, is_refused) end
  end
end
local function write_end(key, id, event, inflight, request, is_refused)
  redis.call('XADD', key, id, '{MESSAGE.decode()}', event, '{END.decode()}', '1')
  redis.call('EXPIRE', key, {LOG_TTL_S})
  leave(inflight, request, is_refused)
end
"""

# KEYS[1]: inflight key. ARGV[1]: msgpack of [[[request id, position, event, is end], …], [[stream
# key, message], …]]. One packed argument, because hundreds of commands a step cost the client more
# than the whole decision. Returns what was refused: [index from 1, what the log holds at that
# position or as its end; nil: the log has lost what came before]. What follows a refused entry in
# its log is refused with it, unseen: it was computed on that one. If anything was refused, no
# message is sent.
WRITE_STEP = (
    _COMMON
    + f"""
local inflight, entries, messages = KEYS[1], unpack(cmsgpack.unpack(ARGV[1]))
local refused, is_cut = {{}}, {{}}
for i, entry in ipairs(entries) do
  local request, position, event, is_end = unpack(entry)
  local key = prefix .. '{log_key("")}' .. request
  local last, has_ended, payload = last_of(key)
  if is_cut[key] then
    refused[#refused + 1] = {{i, ''}}
  elseif has_ended or last >= position then
    is_cut[key] = true
    local found = redis.call('XRANGE', key, position .. '-0', position .. '-0')[1]
    refused[#refused + 1] = {{i, found and found[2][2] or payload}}
  elseif last < position - 1 then
    is_cut[key] = true
    refused[#refused + 1] = {{i, false}}
  elseif is_end then
    write_end(key, position .. '-0', event, inflight, request)
  else
    redis.call('XADD', key, position .. '-0', '{MESSAGE.decode()}', event)
    if position == 1 then redis.call('EXPIRE', key, {RUNNING_LOG_TTL_S}) end
  end
end
if #refused == 0 then
  for _, message in ipairs(messages) do
    local stream = prefix .. message[1]
    redis.call('XADD', stream, '*', '{MESSAGE.decode()}', message[2])
    redis.call('EXPIRE', stream, {REPLICA_STREAM_TTL_S})
  end
end
return refused
"""
)

# KEYS: log key, inflight key, reader key. ARGV: request id, the gateway that reads if nobody resumed
# ('' for none), the event before and after its position, a StepEvents message before and after its
# one event, '1' if the request was refused: then little of it stays stored. The position is the
# log's own. The event of the end that the log holds, this one or an earlier one, goes to whoever
# reads the response.
_END = f"""
local key, inflight, reader = unpack(KEYS)
local request, gateway, head, tail, before, behind, refused = unpack(ARGV)
local last, has_ended, event = last_of(key)
if has_ended then
  leave(inflight, request)
else
  event = head .. cmsgpack.pack(last) .. tail
  write_end(key, last .. '-1', event, inflight, request, refused == '1')
end
gateway = redis.call('HGET', reader, 'gateway') or gateway
if gateway ~= '' then
  local stream = prefix .. '{events("").key}' .. gateway
  redis.call('XADD', stream, '*', '{MESSAGE.decode()}', before .. '\\198' .. struct.pack('>I4', #event) .. event .. behind)
  redis.call('EXPIRE', stream, {REPLICA_STREAM_TTL_S})
end
return last
"""
WRITE_END = _COMMON + _END

_UNDELIVERED = """
local function undelivered(stream, group, count)
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  if groups.err then return {} end
  for _, fields in ipairs(groups) do
    local named = {}
    for i = 1, #fields, 2 do named[fields[i]] = fields[i + 1] end
    if named.name == group then return redis.call('XRANGE', stream, '(' .. named['last-delivered-id'], '+', 'COUNT', count) end
  end
  redis.call('XGROUP', 'CREATE', stream, group, '0')  -- no replica has been there since the stream began
  return redis.call('XRANGE', stream, '-', '+', 'COUNT', count)
end
"""

# KEYS[1]: group stream. ARGV: group, ms, most entries. Returns [entry id, request id, gateway id] of
# the first entries that nobody has taken, as far as they have waited for so long. A record is
# written with its requests, so what is left of its life tells their age. One that is gone, or ends
# soon, is of a request that has ended.
FIND_WAITING = (
    PREFIX
    + _UNDELIVERED
    + f"""
local group, least_ms, count = unpack(ARGV)
local found = {{}}
for _, entry in ipairs(undelivered(KEYS[1], group, count)) do
  local fields = {{}}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  local request = fields['{REQUEST_ID.decode()}'] or ''
  local age_ms = {RUNNING_LOG_TTL_S * 1000} - redis.call('PTTL', prefix .. '{response_key("")}' .. (string.match(request, '^(.*)%.') or request))
  if age_ms < tonumber(least_ms) then break end
  found[#found + 1] = {{entry[1], request, fields['{GATEWAY_ID.decode()}'] or ''}}
end
return found
"""
)

# KEYS: those of WRITE_END, group stream. ARGV: those of WRITE_END, group, consumer, entry id. Takes the entry as the
# group's next reader would, so that nobody else gets it, and ends its request. Entries are never
# deleted before they are delivered: Redis would lose count of the group's lag. If another has taken
# the entry, nothing happens.
END_WAITING = (
    _COMMON
    + _UNDELIVERED
    + """
local waiting, group, consumer, entry = KEYS[4], unpack(ARGV, 8, 10)
local first = undelivered(waiting, group, 1)[1]
if not first or first[1] ~= entry then return false end
redis.call('XREADGROUP', 'GROUP', group, consumer, 'COUNT', 1, 'STREAMS', waiting, '>')
redis.call('XACK', waiting, group, entry)
redis.call('XDEL', waiting, entry)
"""
    + _END
)
# before the event in a StepEvents: the script puts it there
_ONE_EVENT = msgpack.Packer().pack_array_header(1)


@dataclass(slots=True)  # as TokenEvent: nobody changes one, and there is one a token
class LogEntry:
    """A TokenEvent of a token, on its way to the log."""

    event: TokenEvent
    payload: bytes  # the event, encoded once for the log and the gateway


def log_entry(event: TokenEvent) -> LogEntry:
    return LogEntry(event, encode(event))


def write_step(pipe: Pipeline, model: str, entries: Sequence[LogEntry], messages: Sequence[tuple[DirectStream, Any]]) -> None:
    """Queue one step: append the entries to their logs and, unless one of them is refused, send the
    messages in order. WRITE_STEP says what is returned."""
    logs = [[each.event.request_id, each.event.position, each.payload, each.event.finish_reason is not None] for each in entries]
    # Lua's cmsgpack knows msgpack's old raw type only, which holds bytes and text alike
    packed = msgpack.packb([logs, [[stream.key, encode(message)] for stream, message in messages]], use_bin_type=False)
    pipe.eval(WRITE_STEP, 1, inflight_key(model), packed)


def end_request(pipe: Pipeline, model: str, request_id: str, gateway_id: str | None, *, error: RequestError | None = None, num_prompt_tokens: int = 0) -> None:
    """End a request that will get no more tokens: with `error`, or as cancelled without one. A log
    that has an end keeps it. Safe to repeat."""
    reason: FinishReason = "error" if error else "cancelled"
    write_end(pipe, model, TokenEvent(request_id, 0, None, "", num_prompt_tokens=num_prompt_tokens, finish_reason=reason, error=error), gateway_id)


def write_end(pipe: Pipeline, model: str, event: TokenEvent, gateway_id: str | None, moments: tuple[Moments, ...] = ()) -> None:
    """Queue an end without a token. Its position is the log's, whatever the event says. A log that
    has an end keeps it. Safe to repeat."""
    keys, arguments = _end_arguments(model, event, gateway_id, moments)
    pipe.eval(WRITE_END, len(keys), *keys, *arguments)


def _end_arguments(model: str, event: TokenEvent, gateway_id: str | None, moments: tuple[Moments, ...] = ()) -> tuple[tuple[str, ...], tuple[str | bytes, ...]]:
    """KEYS and ARGV of WRITE_END."""
    request_id = event.request_id
    head, tail = encode_around(event, "position")  # the script puts the log's there
    before, behind = encode_around(StepEvents((), moments), "events")
    keys = (log_key(request_id), inflight_key(model), reader_key(response_of(request_id)))
    is_refused = event.error is not None and 400 <= event.error.status < 500
    return keys, (request_id, gateway_id or "", head, tail, before + _ONE_EVENT, behind, "1" if is_refused else "")


def queue_find_waiting(pipe: Pipeline, stream: GroupStream, least_ms: int, count: int) -> None:
    """Ask for the first entries that nobody has taken for least_ms. FIND_WAITING says what is
    returned."""
    pipe.eval(FIND_WAITING, 1, stream.key, stream.group, least_ms, count)


def end_waiting(pipe: Pipeline, stream: GroupStream, consumer: str, entry_id: bytes, model: str, event: TokenEvent, gateway_id: str | None) -> None:
    """Queue the end of a request that nobody has taken yet; entries in their order. Nothing
    happens if somebody has."""
    keys, arguments = _end_arguments(model, event, gateway_id)
    pipe.eval(END_WAITING, 1 + len(keys), *keys, stream.key, *arguments, stream.group, consumer, entry_id)


# KEYS: group stream, then the log of each entry's request. ARGV: group, then the entries' ids. An entry is done when
# its log has an end: Redis may have lost that end since it was written, and the entry is then what
# brings the request back.
FINISH_ENDED = (
    _COMMON
    + """
for i = 2, #KEYS do
  local _, has_ended = last_of(KEYS[i])
  if has_ended then
    redis.call('XACK', KEYS[1], ARGV[1], ARGV[i])
    redis.call('XDEL', KEYS[1], ARGV[i])
  end
end
"""
)


def finish_ended(pipe: Pipeline, stream: GroupStream, request_by_entry: dict[bytes, str]) -> None:
    """Acknowledge and delete the entries whose requests have ended; leave those whose end is not in
    their logs to be claimed again."""
    if request_by_entry:
        logs = map(log_key, request_by_entry.values())
        pipe.eval(FINISH_ENDED, 1 + len(request_by_entry), stream.key, *logs, stream.group, *request_by_entry)


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
    found: list[TokenEvent] = []
    position = after_position
    for entry_id, values in entries:
        try:
            event = decode(TokenEvent, values[MESSAGE])
        except (Invalid, KeyError) as error:
            raise Lost(f"the token log holds what nobody can read at {entry_id.decode()}: {error}") from None
        position += event.token_id is not None
        if event.position != position:
            raise Lost(f"the token log has a gap: position {event.position} follows {position - (event.token_id is not None)}")
        found.append(event)
        if event.finish_reason is not None:
            break
    return found


def decode_entry(payload: bytes) -> TokenEvent:
    """An event as a script returned it. Raises Lost if it is none."""
    try:
        return decode(TokenEvent, payload)
    except Invalid as error:
        raise Lost(f"the token log holds what nobody can read: {error}") from None


def end_alone(event: TokenEvent) -> TokenEvent:
    """The end that an event brings, without its token: its reader has that, or more."""
    return replace(event, token_id=None, text="", logprobs=None, withheld=None, prompt_logprobs=None)
