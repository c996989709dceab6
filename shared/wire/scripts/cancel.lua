-- Cancels requests, if the response's reader is still the one that asks: a reader that has resumed the
-- response reads on. A tombstone stops a request that is queued, the message one that runs.
--
-- KEYS: reader hash, control stream, then the requests' tombstones
-- ARGV: the reader's generation, a Control message, lifetime of the tombstones (s)
-- Returns whether they are cancelled.
-- include: wiring
-- include: control

local reader, control = KEYS[1], KEYS[2]
local generation, message, ttl = unpack(ARGV)
if tonumber(redis.call('HGET', reader, 'generation') or '0') ~= tonumber(generation) then return 0 end
for i = 3, #KEYS do redis.call('SET', KEYS[i], '1', 'EX', ttl) end
broadcast(control, message)
return 1
