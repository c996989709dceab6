-- Notes how far a batch is, and counts what is new. Counts only grow: a worker that begins a batch again
-- knows less of it at first. A batch that is gone stays so.
--
-- KEYS: batch, figures
-- ARGV: lifetime of the figures (s), now (wall clock, s), then counts of the batch and their values in turns

local batch, figures = unpack(KEYS)
local ttl, now = ARGV[1], ARGV[2]
if redis.call('EXISTS', batch) == 0 then return end
for i = 3, #ARGV, 2 do
  local name, value = ARGV[i], ARGV[i + 1]
  local more = tonumber(value) - tonumber(redis.call('HGET', batch, name) or 0)
  if more > 0 then
    redis.call('HSET', batch, name, value, 'progressed_at', now)
    redis.call('HINCRBY', figures, name, more)
    redis.call('EXPIRE', figures, ttl)
  end
end
