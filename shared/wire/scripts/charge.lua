-- Charges a tenant: for requests of another cell before they are submitted there, or for work without
-- requests of its own, such as reading.
--
-- KEYS: the tenant's quota, his running requests
-- ARGV[1], a table:
--   charge: what the tenant may do and is charged (limits.lua)
--   requests: ids of the requests that will run in another cell; place: what stands for that cell in the
--     hash of running requests; ttl: the hash's lifetime, s
-- Returns [left, refusal], as limits.lua has them; refusal: absent if the tenant was charged.
-- include: limits

local quota, running = unpack(KEYS)
local asked = cmsgpack.unpack(ARGV[1])
local limits, requests = asked.charge, asked.requests
local left, exceeded = look_at_limits(quota, running, limits, #requests)
if exceeded then return {left, exceeded} end
charge(quota, limits, left)
if limits.max_concurrency and #requests > 0 then
  for _, request in ipairs(requests) do redis.call('HSET', running, request, asked.place) end
  redis.call('EXPIRE', running, asked.ttl)
end
return {left}
