"""The bytes that a tenant's requests and stored responses hold in Redis: bounded over all gateways, so that
one tenant can't take all of its memory.

A request counts from its admission to its end, a stored response as long as it is stored. The
script that admits a response adds it to its tenant's account (admission.py), those that write an
end release it (shared/wire/token_log.py). What Redis has lost, or dropped early, is found where
there seems to be no room.
"""

import redis.asyncio

from shared.process.errors import Invalid, Rejected
from shared.process.host_memory import size_text
from shared.wire.streams import held_bytes_key, held_key, open_key, stored_key
from shared.wire.token_log import RELEASE

CODE = "storage_limit_exceeded"
MAX_WAIT_S = 60  # that a client is told to wait: others of the tenant's requests may end long before its oldest response expires
MAX_CHECKED = 100  # entries of an account in one script

# For the script that admits, behind PREFIX. `held_by` returns the bytes in an account once what has expired is out
# of it; if that is more than `room`, it looks whether the oldest entries are still there.
HELD = f"""
local function drop(account, member)
  if redis.call('ZREM', account, member) == 1 then redis.call('DECRBY', account .. '{held_bytes_key("")}', string.match(member, '^%d+')) end
end
local function held_by(account, room)
  local now = redis.call('TIME')[1]
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', account, '-inf', now, 'LIMIT', 0, {MAX_CHECKED})) do drop(account, member) end
  if tonumber(redis.call('GET', account .. '{held_bytes_key("")}') or '0') > room then
    for _, member in ipairs(redis.call('ZRANGE', account, 0, {MAX_CHECKED - 1})) do
      local id = string.match(member, '/(.*)$')
      if redis.call('EXISTS', prefix .. '{open_key("")}' .. id, prefix .. '{stored_key("")}' .. id) == 0 then drop(account, member) end
    end
  end
  return tonumber(redis.call('GET', account .. '{held_bytes_key("")}') or '0')
end
local function wait_for_room(account)
  local oldest = redis.call('ZRANGE', account, 0, 0, 'WITHSCORES')[2]
  return oldest and math.max(1, oldest - redis.call('TIME')[1]) or 1
end
local function hold(account, member, size, ttl)
  local added = redis.call('ZADD', account, redis.call('TIME')[1] + ttl, member)  -- a batch's worker may submit again what Redis has lost in part
  redis.call('INCRBY', account .. '{held_bytes_key("")}', size * added)
  redis.call('EXPIRE', account, ttl)
  redis.call('EXPIRE', account .. '{held_bytes_key("")}', ttl)
end
"""

# KEYS: account, stored key. ARGV: response id
DELETE = (
    RELEASE
    + """
release(KEYS[1], redis.call('STRLEN', KEYS[2]) .. '/' .. ARGV[1], 0)
redis.call('UNLINK', KEYS[2])
"""
)

# KEYS: account, stored key, and a key that must be there, if any. ARGV: response id, the length of what was read, what is to be stored in its place. Changed
# since it was read, it stays as it is.
REWRITE = f"""
local account, stored, needed = unpack(KEYS)
local id, size, content = unpack(ARGV)
if needed and redis.call('EXISTS', needed) == 0 or redis.call('STRLEN', stored) ~= tonumber(size) then return end
redis.call('SET', stored, content, 'KEEPTTL')
local expires = redis.call('ZSCORE', account, size .. '/' .. id)
if not expires then return end
redis.call('ZREM', account, size .. '/' .. id)
redis.call('ZADD', account, expires, #content .. '/' .. id)
redis.call('INCRBY', account .. '{held_bytes_key("")}', #content - size)
"""


def check_size(size: int, most: int) -> None:
    """Raises Invalid for a request that never fits, whatever its tenant holds."""
    if size > most:
        raise Invalid(f"the request is more than the {size_text(most)} that are kept for a key: lower n, or send less", code="request_exceeds_limit")


def too_much_held(held: int, more: int, most: int, wait_s: int) -> Rejected:
    """The refusal for a request of `more` bytes, of a tenant that holds `held`."""
    message = (
        f"this key's requests and stored responses hold {size_text(held)}, and {size_text(most)} at most are kept: this request would add {size_text(more)}. "
        f"Delete stored responses, send store: false, or come again: the oldest expires in {wait_s} s"
    )
    return Rejected(message, status=429, retry_after_s=min(wait_s, MAX_WAIT_S), code=CODE)


def queue_delete(pipe: "redis.asyncio.client.Pipeline", tenant_id: str, response_id: str) -> None:
    """Queue that nothing stays stored of a response that has ended."""
    pipe.eval(DELETE, 2, held_key(tenant_id), stored_key(response_id), response_id)


def queue_rewrite(pipe: "redis.asyncio.client.Pipeline", tenant_id: str, response_id: str, size: int, content: bytes, needed: str = "") -> None:
    """Queue that something else is stored of a response that has ended. size: of what was read, in bytes; needed: a response that must be stored, too."""
    keys = [held_key(tenant_id), stored_key(response_id), *([stored_key(needed)] if needed else [])]
    pipe.eval(REWRITE, len(keys), *keys, response_id, size, content)
