-- Gives a tenant back what charge.lua has charged for requests that were not submitted.
--
-- KEYS: the tenant's quota, his running requests
-- ARGV: requests, tokens, then ids of the requests

local quota, running = unpack(KEYS)
local held = redis.call('HMGET', quota, 'requests', 'tokens')
if tonumber(held[1]) then redis.call('HINCRBYFLOAT', quota, 'requests', ARGV[1]) end
if tonumber(held[2]) then redis.call('HINCRBYFLOAT', quota, 'tokens', ARGV[2]) end
for i = 3, #ARGV do redis.call('HDEL', running, ARGV[i]) end
if held[1] or held[2] then redis.call('EXPIRE', quota, 120) end
