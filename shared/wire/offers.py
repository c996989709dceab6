"""Offers: prompts that are delivered to a compute replica by choice, since it has their prefix.

An offered prompt stands in the stream of all prompts, and is pending with the chosen replica like
any that it read itself: so who claims it from a dead one, and who is blamed, is as for all others.
Beside it stands a hint, from when on it is better to compute the prefix again than to wait for that
replica any longer. Then anybody steals it.
"""

from collections.abc import Sequence
from typing import Any

from shared.wire.entries import DeadLetter, Delivery, GroupReader
from shared.wire.line import Pipeline
from shared.wire.messages import TAGS, Offer, TokenizedRequest, encode
from shared.wire.streams import GATEWAY_ID, MESSAGE, REPLICA_STREAM_TTL_S, REQUEST_ID, GroupStream, offered, offers_key

MAX_OFFERED = 1024  # in a replica's stream: what is older was taken up or stolen long ago
OFFERS_TTL_S = 3600  # past the last offer


def offer(pipe: Pipeline, stream: GroupStream, message: TokenizedRequest, compute_id: str, wait_ms: int) -> None:
    """Queue the message for that replica; others may take it after wait_ms. Behind entries that nobody
    has read yet, it waits like these, for whoever comes."""
    told = offered(compute_id).key
    pipe.eval(
        OFFER, 3, stream.key, offers_key(message.model), told, stream.group, compute_id, wait_ms, encode(message), message.request_id, message.gateway_id or ""
    )


def take_up(reader: GroupReader, model: str, entry_ids: Sequence[str]) -> tuple[list[Delivery], list[DeadLetter]]:
    """The reader's entries among these that nobody has stolen: from now on nobody does."""
    found: Any = reader.transport.run(
        lambda pipe: pipe.eval(TAKE_UP, 2, reader.stream.key, offers_key(model), reader.stream.group, reader.consumer, *entry_ids)
    )
    return reader.open_fresh(entries_of_script(found[0]))


def steal(reader: GroupReader, model: str, count: int) -> tuple[list[Delivery], list[DeadLetter]]:
    """Up to count entries that were offered to others, and have waited for too long."""
    found: Any = reader.transport.run(lambda pipe: pipe.eval(STEAL, 2, reader.stream.key, offers_key(model), reader.stream.group, reader.consumer, count))
    return reader.open_fresh(entries_of_script(found[0]))


def entries_of_script(found: list[tuple[bytes, list[bytes]]]) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Entries as a script returns them, with their fields and values in turns."""
    return [(entry_id, dict(zip(values[::2], values[1::2], strict=True))) for entry_id, values in found]


# KEYS: prompts, offers, the replica's stream; ARGV: group, replica, wait in ms, the entry's fields.
# Only if all earlier entries are delivered does reading give this one.
OFFER = f"""
local is_next = false
if redis.call('EXISTS', KEYS[1]) == 1 then
  local newest = redis.call('XINFO', 'STREAM', KEYS[1])[8]
  for _, fields in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    local group = {{}}
    for i = 1, #fields, 2 do group[fields[i]] = fields[i + 1] end
    if group.name == ARGV[1] then is_next = group['last-delivered-id'] == newest end
  end
end
local id = redis.call('XADD', KEYS[1], '*', '{MESSAGE.decode()}', ARGV[4], '{REQUEST_ID.decode()}', ARGV[5], '{GATEWAY_ID.decode()}', ARGV[6])
if not is_next then return end
redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', 1, 'STREAMS', KEYS[1], '>')
local now = redis.call('TIME')
redis.call('ZADD', KEYS[2], now[1] * 1000 + math.floor(now[2] / 1000) + ARGV[3], id .. '/' .. ARGV[2])
redis.call('EXPIRE', KEYS[2], {OFFERS_TTL_S})
redis.call('XADD', KEYS[3], 'MAXLEN', '~', {MAX_OFFERED}, '*', '{MESSAGE.decode()}', cmsgpack.pack({{'{TAGS[Offer][0]}', {TAGS[Offer][1]}, id}}))
redis.call('EXPIRE', KEYS[3], {REPLICA_STREAM_TTL_S})
"""
# whether an entry that was offered to a replica is still with it: neither claimed nor ended
IS_WITH = """
local function is_with(stream, group, id, replica)
  local pending = redis.call('XPENDING', stream, group, id, id, 1)[1]
  return pending and pending[2] == replica
end
"""
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
# KEYS: the same; ARGV: group, thief, how many. It was delivered once, and nobody has begun it.
STEAL = (
    IS_WITH
    + """
local found, now = {}, redis.call('TIME')
local late = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now[1] * 1000 + math.floor(now[2] / 1000), 'LIMIT', 0, ARGV[3])
for _, member in ipairs(late) do
  redis.call('ZREM', KEYS[2], member)
  local id, replica = string.match(member, '^([^/]+)/(.*)$')
  if is_with(KEYS[1], ARGV[1], id, replica) then
    found[#found + 1] = redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, id, 'RETRYCOUNT', 1)[1]
  end
end
return found
"""
)
