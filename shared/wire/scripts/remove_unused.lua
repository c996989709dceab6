-- Removes a stream that is empty and has been for some time. A script, because a gateway may be about to
-- add to it.
--
-- KEYS: stream
-- ARGV: ms since the last entry
-- Returns whether it was removed.

local stream, unused_ms = KEYS[1], tonumber(ARGV[1])
if redis.call('TYPE', stream).ok ~= 'stream' or redis.call('XLEN', stream) > 0 then return 0 end
local now = redis.call('TIME')
local last = tonumber(string.match(redis.call('XINFO', 'STREAM', stream)[8], '^%d+'))
if tonumber(now[1]) * 1000 - last < unused_ms then return 0 end
return redis.call('DEL', stream)
