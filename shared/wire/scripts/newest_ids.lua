-- The last id that each stream has given out.
--
-- KEYS: streams
-- Returns an id for each; '' for a stream that does not exist.

local newest = {}
for i, key in ipairs(KEYS) do newest[i] = redis.call('EXISTS', key) == 1 and redis.call('XINFO', 'STREAM', key)[8] or '' end
return newest
