-- Notes how often in a row a batch was begun in vain. Makes no batch of one that is gone.
--
-- KEYS: batch
-- ARGV: the number

if redis.call('EXISTS', KEYS[1]) == 1 then redis.call('HSET', KEYS[1], 'num_begun', ARGV[1]) end
