-- Gives a batch another status, if it has one of those from which it may go there. Counts an end, once.
--
-- KEYS: batch, set of running batches, figures
-- ARGV[1], a table: id; allowed: statuses; status: the next; is_end; now (wall clock, s); figures_ttl (s)
-- ARGV[2 …]: further fields and values of the batch in turns
-- Returns the status that it has then; nil: there is no such batch.

local key, running, figures = unpack(KEYS)
local asked = cmsgpack.unpack(ARGV[1])
local present, is_allowed = redis.call('HGET', key, 'status'), false
for _, each in ipairs(asked.allowed) do is_allowed = is_allowed or each == present end
if not is_allowed then return present end
redis.call('HSET', key, 'status', asked.status, asked.status .. '_at', asked.now, unpack(ARGV, 2))
if asked.is_end then
  redis.call('SREM', running, asked.id)
  if redis.call('SCARD', running) == 0 then redis.call('HDEL', figures, 'lines_waiting', 'oldest_at', 'progressed_at') end
  redis.call('HINCRBY', figures, 'ended:' .. asked.status, 1)
  redis.call('EXPIRE', figures, asked.figures_ttl)
end
return asked.status
