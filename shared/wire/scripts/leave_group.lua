-- Removes a consumer if nothing is pending with it. A script, for the reason in forget_consumers.lua.
--
-- KEYS: group stream
-- ARGV: group, consumer

local stream, group, consumer = KEYS[1], unpack(ARGV)
if #redis.call('XPENDING', stream, group, '-', '+', 1, consumer) == 0 then redis.call('XGROUP', 'DELCONSUMER', stream, group, consumer) end
