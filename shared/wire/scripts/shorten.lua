-- Shortens the life of what has ended; what still runs has longer to live, and stays.
--
-- KEYS: key
-- ARGV: its lifetime from now on (s), the longest lifetime of what has ended (s)

if redis.call('TTL', KEYS[1]) <= tonumber(ARGV[2]) then redis.call('EXPIRE', KEYS[1], ARGV[1]) end
