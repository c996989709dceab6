-- Makes a gateway the response's next reader, if no other has become that meanwhile.
--
-- KEYS: reader hash, response record (the hash lives as long), control stream
-- ARGV: the generation of the present reader, the gateway, a Control message of the next generation
-- Returns whether it is the reader.
-- include: wiring
-- include: control

local reader, response, control = unpack(KEYS)
local generation, gateway, message = unpack(ARGV)
if tonumber(redis.call('HGET', reader, 'generation') or '0') ~= tonumber(generation) then return 0 end
redis.call('HSET', reader, 'generation', generation + 1, 'gateway', gateway)
redis.call('PEXPIRE', reader, math.max(redis.call('PTTL', response), 1000))
broadcast(control, message)
return 1
