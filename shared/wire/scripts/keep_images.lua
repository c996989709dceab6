-- Puts the files of a response's images where compute finds them.
--
-- KEYS: images hash
-- ARGV: lifetime until the response is submitted, s; then digests and files in turns

for i = 2, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
-- a response that is submitted a second time has given its images their lifetime already
if redis.call('TTL', KEYS[1]) < 0 then redis.call('EXPIRE', KEYS[1], ARGV[1]) end
