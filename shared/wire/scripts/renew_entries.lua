-- Renews a consumer's claim to entries, as far as they are still pending with it: one that was stopped for
-- a while must not take back what another has claimed.
--
-- KEYS: group stream
-- ARGV: group, consumer, then entry ids

local stream, group, consumer = KEYS[1], ARGV[1], ARGV[2]
for i = 3, #ARGV do
  local pending = redis.call('XPENDING', stream, group, ARGV[i], ARGV[i], 1)[1]
  if pending and pending[2] == consumer then redis.call('XCLAIM', stream, group, consumer, 0, ARGV[i], 'JUSTID') end
end
