-- The entries that are pending with another consumer now.
--
-- KEYS: group stream
-- ARGV: group, consumer, then entry ids
-- Returns the ids of those that another has.

local stream, group, consumer = KEYS[1], ARGV[1], ARGV[2]
local taken = {}
for i = 3, #ARGV do
  local pending = redis.call('XPENDING', stream, group, ARGV[i], ARGV[i], 1)[1]
  if pending and pending[2] ~= consumer then taken[#taken + 1] = ARGV[i] end
end
return taken
