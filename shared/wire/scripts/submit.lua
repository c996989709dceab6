-- Hands the requests of a response over, all or none, and takes what they need: places of the model,
-- shares of the tenant, bytes of his account. give_back.lua gives it back, and says which keys are meant.
-- A response that was submitted before is not submitted again: the worker of a batch that goes on after
-- a death does not know how far the batch had come.
--
-- KEYS: inflight hash, response record, stored data, open hash, shares hash, images hash, the tenant's
--   quota, his running requests, his account, the first request's log
-- ARGV[1], a table:
--   stream: the requests stream (no key, for a gateway must be allowed to read a script's keys, and may
--     only write this one)
--   gateway: the gateway's id
--   ttl: lifetime of all that is written, s
--   max_requests, max_tokens: most in flight of the model; tokens: those of all these requests
--   charge: what the tenant may do and is charged (limits.lua); nil: he has no limits here
--   max_size, size: most bytes in the account, bytes of this response
--   keeps: most bytes that stay stored if the response is refused
--   requests: [id, tokens] of each request
-- ARGV[2]: the response's record. ARGV[3]: what is stored; empty: nothing. ARGV[4 …]: the messages, one a request
--
-- Returns [left, refusal]. left: what is left to the tenant [requests, tokens, ms], empty without limits.
-- refusal: absent, or why nothing was submitted: ['full', requests, tokens] with what is in flight,
-- ['held', bytes, s to wait], or a limit of the tenant with the ms to wait (limits.lua).
-- include: wiring
-- include: limits

local MAX_CHECKED = 100  -- entries of an account, so that the script stays short
local inflight, response, stored, open, shares, images, quota, running, account, log = unpack(KEYS)
local asked, record, content = cmsgpack.unpack(ARGV[1]), ARGV[2], ARGV[3]
local FIRST_MESSAGE = 4
local requests, tokens, size, ttl, limits = asked.requests, asked.tokens, asked.size, asked.ttl, asked.charge
local num_requests, first = #requests, requests[1][1]
local bytes_held, now = account .. ':bytes', redis.call('TIME')[1]

local function forget(member)
  if redis.call('ZREM', account, member) == 1 then redis.call('DECRBY', bytes_held, string.match(member, '^%d+')) end
end

-- The bytes in the account, once what has expired is out of it. If they are more than `room`, entries of
-- which Redis has lost the data go, too.
local function count_bytes(room)
  for _, member in ipairs(redis.call('ZRANGEBYSCORE', account, '-inf', now, 'LIMIT', 0, MAX_CHECKED)) do forget(member) end
  local held = tonumber(redis.call('GET', bytes_held) or '0')
  if held <= room then return held end
  for _, member in ipairs(redis.call('ZRANGE', account, 0, MAX_CHECKED - 1)) do
    local id = string.match(member, '/(.*)$')
    if redis.call('EXISTS', prefix .. 'open:' .. id, prefix .. 'stored:' .. id) == 0 then forget(member) end
  end
  return tonumber(redis.call('GET', bytes_held) or '0')
end

local function wait_for_room()
  local oldest = redis.call('ZRANGE', account, 0, 0, 'WITHSCORES')[2]
  return oldest and math.max(1, oldest - now) or 1
end

if redis.call('HEXISTS', inflight, first) == 1 or redis.call('EXISTS', log) == 1 then return {{}} end

local left, exceeded = {}, nil
if limits then
  left, exceeded = look_at_limits(quota, running, limits, num_requests)
  if exceeded then return {left, exceeded} end
end

local held = count_bytes(asked.max_size - size)
if held + size > asked.max_size then return {left, {'held', held, wait_for_room()}} end

local held_requests = math.max(redis.call('HLEN', inflight) - 1, 0)
local held_tokens = tonumber(redis.call('HGET', inflight, '') or '0')
local own_requests, own_tokens = unpack(redis.call('HMGET', shares, account, account .. ' tokens'))
local num_tenants = redis.call('HLEN', shares) / 2 + (own_requests and 0 or 1)
-- a full pipeline is full for the tenants that fill it: one with less than an even share is admitted
local function fits(all, own, more, most) return all + more <= most or (tonumber(own) or 0) + more <= most / num_tenants end
if not (fits(held_requests, own_requests, num_requests, asked.max_requests) and fits(held_tokens, own_tokens, tokens, asked.max_tokens)) then
  return {left, {'full', held_requests, held_tokens}}
end

if limits then charge(quota, limits, left) end
redis.call('SET', response, record, 'EX', ttl)
if content ~= '' then redis.call('SET', stored, content, 'EX', ttl) end
redis.call('EXPIRE', images, ttl)
redis.call('HSET', open, 'left', num_requests, 'account', account, 'size', size, 'keeps', asked.keeps)
redis.call('EXPIRE', open, ttl)
-- none is added if the response is there: a batch's worker submits again what Redis has lost in part
local added = redis.call('ZADD', account, now + ttl, size .. '/' .. string.match(first, '^(.*)%.'))
redis.call('INCRBY', bytes_held, size * added)
redis.call('EXPIRE', account, ttl)
redis.call('EXPIRE', bytes_held, ttl)
for i, request in ipairs(requests) do
  local id, num_tokens = unpack(request)
  redis.call('HSET', inflight, id, num_tokens)
  redis.call('XADD', prefix .. asked.stream, '*', MESSAGE, ARGV[FIRST_MESSAGE + i - 1], REQUEST_ID, id, GATEWAY_ID, asked.gateway)
end
redis.call('HINCRBY', inflight, '', tokens)
redis.call('EXPIRE', inflight, ttl)
redis.call('HINCRBY', shares, account, num_requests)
redis.call('HINCRBY', shares, account .. ' tokens', tokens)
redis.call('EXPIRE', shares, ttl)
if limits and limits.max_concurrency then
  for _, request in ipairs(requests) do redis.call('HSET', running, request[1], inflight) end
  redis.call('EXPIRE', running, ttl)
end
return {left}
