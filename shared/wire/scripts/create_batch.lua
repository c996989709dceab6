-- Makes a batch, unless too many of its owner's are running. Of more than are kept, those that ended first
-- are forgotten.
--
-- KEYS: batch, the owner's batches, set of running batches
-- ARGV[1], a table: id; now (wall clock, s); ttl (s); max_running, max_kept
-- ARGV[2 …]: fields and values of the batch in turns
-- Returns whether it was made.
-- include: wiring

local key, owned, running = unpack(KEYS)
local asked = cmsgpack.unpack(ARGV[1])
if #redis.call('ZINTER', 2, owned, running) >= asked.max_running then return 0 end
redis.call('ZREMRANGEBYSCORE', owned, '-inf', asked.now - asked.ttl)
local surplus = redis.call('ZCARD', owned) + 1 - asked.max_kept
for _, old in ipairs(surplus > 0 and redis.call('ZRANGE', owned, 0, surplus - 1) or {}) do
  if redis.call('SISMEMBER', running, old) == 0 then
    redis.call('DEL', prefix .. 'batch:' .. old)
    redis.call('ZREM', owned, old)
  end
end
redis.call('HSET', key, unpack(ARGV, 2))
redis.call('EXPIRE', key, asked.ttl)
redis.call('ZADD', owned, asked.now, asked.id)
redis.call('EXPIRE', owned, asked.ttl)
redis.call('SADD', running, asked.id)
redis.call('EXPIRE', running, asked.ttl)
return 1
