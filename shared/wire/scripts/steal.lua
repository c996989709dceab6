-- Takes entries that were offered and not taken up in time. They were delivered once, and no replica has
-- begun them.
--
-- KEYS: prompts stream, offers
-- ARGV: group, the replica that takes them, most entries
-- Returns [entries, how many of them were other replicas'].
-- include: offers

local stream, offers = unpack(KEYS)
local group, thief, count = unpack(ARGV)
local entries, num_stolen = {}, 0
for _, member in ipairs(redis.call('ZRANGEBYSCORE', offers, '-inf', now_ms(), 'LIMIT', 0, count)) do
  redis.call('ZREM', offers, member)
  local id, replica = string.match(member, '^([^/]+)/(.*)$')
  if is_with(stream, group, id, replica) then
    entries[#entries + 1] = redis.call('XCLAIM', stream, group, thief, 0, id, 'RETRYCOUNT', 1)[1]
    if replica ~= thief then num_stolen = num_stolen + 1 end
  end
end
return {entries, num_stolen}
