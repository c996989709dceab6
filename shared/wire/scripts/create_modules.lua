-- Keeps a set of prompt modules, if there is room for it among its owner's.
--
-- KEYS: the set, its owner's sets
-- ARGV[1], a table: id; now (wall clock, s); ttl: past its last use (s); max_sets, max_bytes: of one owner;
--   size: of this set (bytes)
-- ARGV[2 …]: fields and values of the set in turns
-- Returns whether there is room.

local key, owned = unpack(KEYS)
local asked = cmsgpack.unpack(ARGV[1])
redis.call('ZREMRANGEBYSCORE', owned, '-inf', asked.now - asked.ttl)
local member, sum, count = asked.size .. '/' .. asked.id, 0, 0
for _, each in ipairs(redis.call('ZRANGE', owned, 0, -1)) do
  if each ~= member then sum, count = sum + string.match(each, '^%d+'), count + 1 end
end
if count >= asked.max_sets or sum + asked.size > asked.max_bytes then return 0 end
if redis.call('EXISTS', key) == 0 then redis.call('HSET', key, unpack(ARGV, 2)) end
redis.call('EXPIRE', key, asked.ttl)
redis.call('ZADD', owned, asked.now, member)
redis.call('EXPIRE', owned, asked.ttl)
return 1
