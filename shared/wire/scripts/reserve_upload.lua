-- Reserves the room of a file that is about to be stored.
--
-- KEYS: the owner's uploads
-- ARGV: "<file id>/<bytes>", ms for which it is reserved
-- Returns those that have reserved theirs before.

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
local before = redis.call('ZRANGE', KEYS[1], 0, -1)
redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return before
