"""Offers: prompts that are delivered to a compute replica by choice, because it has their prefix.

An offered prompt stands in the stream of all prompts, and is pending with the chosen replica like
any that it read itself: so who claims it from a dead one, and who is blamed, is as for all others.
Beside it stands a hint, from when on it is better to compute the prefix again than to wait for that
replica any longer. Then anybody steals it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shared.wire.entries import DeadLetter, Delivery, GroupReader, append_to_group
from shared.wire.line import Pipeline
from shared.wire.messages import TAGS, Offer, TokenizedRequest
from shared.wire.streams import MESSAGE, PREFIX, REPLICA_STREAM_TTL_S, GroupStream, offered, offers_key, replica_key

MAX_OFFERED = 1024  # in a replica's stream: what is older was taken up or stolen long ago
OFFERS_TTL_S = 3600  # past the last offer
# by which a pending entry's idle time may fall short of its age, and still nobody has renewed it
TOLERANCE_MS = 100


def offer(pipe: Pipeline, stream: GroupStream, message: TokenizedRequest, compute_id: str, wait_ms: int) -> None:
    """Queue the message for that replica, if it lives; others may take it after wait_ms. Behind
    entries that nobody has read yet, it waits like these, for whoever comes.

    The message is appended by a command of its own: in a transaction that a full Redis refuses,
    nothing is done. Delivering it may fail, and then it is like any other.
    """
    append_to_group(pipe, stream, message)
    keys = (stream.key, offers_key(message.model), offered(compute_id).key)
    pipe.eval(DELIVER, len(keys), *keys, stream.group, compute_id, wait_ms, replica_key("compute", compute_id))


def take_up(reader: GroupReader, model: str, entry_ids: Sequence[str]) -> tuple[list[Delivery], list[DeadLetter]]:
    """The reader's entries among these that nobody has stolen: from now on nobody does."""
    found: Any = reader.transport.run(
        lambda pipe: pipe.eval(TAKE_UP, 2, reader.stream.key, offers_key(model), reader.stream.group, reader.consumer, *entry_ids)
    )
    return reader.open_fresh(entries_of_script(found[0]))


@dataclass(frozen=True, slots=True)
class Loot:
    """Entries that waited for too long."""

    deliveries: list[Delivery]
    dead: list[DeadLetter]
    num_stolen: int  # of them, from other replicas


def steal(reader: GroupReader, model: str, count: int) -> Loot:
    """Up to count entries that were offered, to whomever, and were not taken up in time."""
    found: Any = reader.transport.run(lambda pipe: pipe.eval(STEAL, 2, reader.stream.key, offers_key(model), reader.stream.group, reader.consumer, count))
    entries, num_stolen = found[0]
    return Loot(*reader.open_fresh(entries_of_script(entries)), num_stolen)


def entries_of_script(found: list[tuple[bytes, list[bytes]]]) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Entries as a script returns them, with their fields and values in turns."""
    return [(entry_id, dict(zip(values[::2], values[1::2], strict=True))) for entry_id, values in found]


NOW = """
local function now_ms()
  local now = redis.call('TIME')
  return now[1] * 1000 + math.floor(now[2] / 1000)
end
"""
# KEYS: prompts, offers, the replica's stream; ARGV: group, replica, wait in ms, the replica's announcement (a tokenizer may only read it,
# and must be allowed to write a script's keys). The last entry is to be delivered: reading gives it if it is the only one that is not. A
# full Redis refuses the hint: pcall, for an error here would have the whole transaction repeated.
DELIVER = (
    PREFIX
    + NOW
    + f"""
if redis.call('EXISTS', prefix .. ARGV[4]) == 0 then return end
local delivered
for _, fields in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
  local group = {{}}
  for i = 1, #fields, 2 do group[fields[i]] = fields[i + 1] end
  if group.name == ARGV[1] then delivered = group['last-delivered-id'] end
end
local undelivered = delivered and redis.call('XRANGE', KEYS[1], '(' .. delivered, '+', 'COUNT', 2) or {{}}
if #undelivered ~= 1 then return end
local id = undelivered[1][1]
local hint = redis.pcall('ZADD', KEYS[2], now_ms() + ARGV[3], id .. '/' .. ARGV[2])
if type(hint) == 'table' then return end
redis.call('EXPIRE', KEYS[2], {OFFERS_TTL_S})
redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', 1, 'STREAMS', KEYS[1], '>')
redis.pcall('XADD', KEYS[3], 'MAXLEN', '~', {MAX_OFFERED}, '*', '{MESSAGE.decode()}', cmsgpack.pack({{'{TAGS[Offer][0]}', {TAGS[Offer][1]}, id}}))
redis.call('EXPIRE', KEYS[3], {REPLICA_STREAM_TTL_S})
"""
)
# whether an entry that was offered to a replica is with it, and was since: neither claimed nor ended,
# nor renewed by one that works on it
IS_WITH = (
    NOW
    + f"""
local function is_with(stream, group, id, replica)
  local pending = redis.call('XPENDING', stream, group, id, id, 1)[1]
  return pending and pending[2] == replica and pending[3] + {TOLERANCE_MS} >= now_ms() - string.match(id, '^%d+')
end
"""
)
# KEYS: prompts, offers; ARGV: group, replica, entry ids
TAKE_UP = (
    IS_WITH
    + """
local found = {}
for i = 3, #ARGV do
  local was_offered = redis.call('ZREM', KEYS[2], ARGV[i] .. '/' .. ARGV[2]) == 1
  if was_offered and is_with(KEYS[1], ARGV[1], ARGV[i], ARGV[2]) then
    found[#found + 1] = redis.call('XRANGE', KEYS[1], ARGV[i], ARGV[i])[1]
  end
end
return found
"""
)
# KEYS: the same; ARGV: group, thief, how many. They were delivered once, and nobody has begun them.
STEAL = (
    IS_WITH
    + """
local found, num_stolen = {}, 0
local late = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now_ms(), 'LIMIT', 0, ARGV[3])
for _, member in ipairs(late) do
  redis.call('ZREM', KEYS[2], member)
  local id, replica = string.match(member, '^([^/]+)/(.*)$')
  if is_with(KEYS[1], ARGV[1], id, replica) then
    found[#found + 1] = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, id, 'RETRYCOUNT', 1)[1]
    if replica ~= ARGV[2] then num_stolen = num_stolen + 1 end
  end
end
return {found, num_stolen}
"""
)
