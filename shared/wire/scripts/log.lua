-- Library: token logs. The token at position p has the entry `p-0`; an end without a token after p tokens
-- has `p-1`. An entry that ends its request has a second field. Needs wiring and give_back.

-- The last entry of a log: position (0: there is none), whether the request has ended, entry id, event.
local function last_of(log)
  local last = redis.call('XREVRANGE', log, '+', '-', 'COUNT', 1)[1]
  if not last then return 0, false end
  return tonumber(string.match(last[1], '^%d+')), #last[2] > 2, last[1], last[2][2]
end

-- Append the entry that ends a request, and give its place back.
local function append_end(log, id, event, inflight, request, is_refused)
  redis.call('XADD', log, id, MESSAGE, event, 'e', '1')
  redis.call('EXPIRE', log, LOG_TTL_S)
  leave(inflight, request, is_refused)
end
