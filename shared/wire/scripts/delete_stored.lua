-- Deletes what is stored of a response that has ended, and takes it out of its tenant's account.
--
-- KEYS: the tenant's account, stored data
-- ARGV: response id
-- include: wiring
-- include: give_back

local account, stored = unpack(KEYS)
release(account, redis.call('STRLEN', stored) .. '/' .. ARGV[1], 0)
redis.call('UNLINK', stored)
