-- Stores something else of a response that has ended, if what is stored is still what was read.
--
-- KEYS: the tenant's account, stored data; and a key that must exist, if any
-- ARGV: response id, length of what was read, what is to be stored in its place

local account, stored, needed = unpack(KEYS)
local response, size, content = unpack(ARGV)
if needed and redis.call('EXISTS', needed) == 0 or redis.call('STRLEN', stored) ~= tonumber(size) then return end
redis.call('SET', stored, content, 'KEEPTTL')
local expires = redis.call('ZSCORE', account, size .. '/' .. response)
if not expires then return end
redis.call('ZREM', account, size .. '/' .. response)
redis.call('ZADD', account, expires, #content .. '/' .. response)
redis.call('INCRBY', account .. ':bytes', #content - size)
