-- The first requests that no replica has taken for some time.
--
-- KEYS: group stream
-- ARGV: group, ms that they have waited at least, most requests
-- Returns [entry id, request id, gateway id] of each.
-- include: wiring
-- include: undelivered

local group, min_age_ms, count = unpack(ARGV)
local waiting = {}
for _, entry in ipairs(undelivered(KEYS[1], group, count)) do
  local fields = {}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  local request = fields[REQUEST_ID] or ''
  -- A record is written with its requests, so what is left of its life tells their age. If it is gone, or
  -- ends soon, the request has ended.
  local response = string.match(request, '^(.*)%.') or request
  local age_ms = RUNNING_LOG_TTL_S * 1000 - redis.call('PTTL', prefix .. 'response:' .. response)
  if age_ms < tonumber(min_age_ms) then break end
  waiting[#waiting + 1] = {entry[1], request, fields[GATEWAY_ID] or ''}
end
return waiting
