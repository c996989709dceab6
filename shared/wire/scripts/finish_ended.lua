-- Acknowledges and deletes the entries whose requests have ended, as their logs say: Redis may have lost
-- an end since it was written, and the entry is then what brings the request back.
--
-- KEYS: group stream, then the log of each entry's request
-- ARGV: group, then the entries' ids
-- include: wiring
-- include: give_back
-- include: log

local stream, group = KEYS[1], ARGV[1]
for i = 2, #KEYS do
  local _, has_ended = last_of(KEYS[i])
  if has_ended then
    redis.call('XACK', stream, group, ARGV[i])
    redis.call('XDEL', stream, ARGV[i])
  end
end
