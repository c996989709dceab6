-- Notes that a batch's input is right. It is in progress then, unless it was cancelled.
--
-- KEYS: batch
-- ARGV: now (wall clock, s), then fields and values of the batch in turns

local status = redis.call('HGET', KEYS[1], 'status')
if not status then return end
redis.call('HSET', KEYS[1], unpack(ARGV, 2))
if status == 'validating' then redis.call('HSET', KEYS[1], 'status', 'in_progress', 'in_progress_at', ARGV[1]) end
