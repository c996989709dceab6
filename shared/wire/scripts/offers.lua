-- Library: offered entries (shared/wire/offers.py).

local function now_ms()
  local now = redis.call('TIME')
  return now[1] * 1000 + math.floor(now[2] / 1000)
end

-- Whether an entry that was offered to a replica is with it, and was since: neither claimed nor ended, nor
-- renewed by a replica that works on it. Its idle time may fall short of its age by the tolerance.
local function is_with(stream, group, id, replica)
  local TOLERANCE_MS = 100
  local pending = redis.call('XPENDING', stream, group, id, id, 1)[1]
  return pending and pending[2] == replica and pending[3] + TOLERANCE_MS >= now_ms() - string.match(id, '^%d+')
end
