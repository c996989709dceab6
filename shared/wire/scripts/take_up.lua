-- Takes up what was offered to a replica: from now on no other may take it.
--
-- KEYS: prompts stream, offers
-- ARGV: group, replica, then entry ids
-- Returns the entries that are still the replica's.
-- include: offers

local stream, offers = unpack(KEYS)
local group, replica = ARGV[1], ARGV[2]
local entries = {}
for i = 3, #ARGV do
  local was_offered = redis.call('ZREM', offers, ARGV[i] .. '/' .. replica) == 1
  if was_offered and is_with(stream, group, ARGV[i], replica) then
    entries[#entries + 1] = redis.call('XRANGE', stream, ARGV[i], ARGV[i])[1]
  end
end
return entries
