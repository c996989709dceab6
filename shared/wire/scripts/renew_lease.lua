-- Renews the lease of a batch, or gives it up, if it is still this run's.
--
-- KEYS: lease
-- ARGV: the run's token, lifetime in ms (0: give it up)
-- Returns whether it was still this run's.

if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[2] == '0' then redis.call('DEL', KEYS[1]) else redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return 1
