-- Library: gives back what submit.lua has taken for a request that ends. Needs wiring.
--
-- taken                                             given back
-- a field of inflight:<model>, and its share of ""  leave: when the request ends
-- the tenant's fields of shares:<model>             leave: the same
-- open:<response>: left                             leave: one a request; with the last one, close deletes the hash
-- open:<response>: account, size, keeps             say to close what is to be given back, and to whom
-- a member of held:<tenant>, and its bytes          close: what stays stored is counted in place of it
-- response:, stored:, reader:, images:<response>    close: images go at once, the others an hour later

-- Count `left` bytes in an account in place of a member's, for as long as a log is kept.
-- member: "<bytes>/<response>"
local function release(account, member, left)
  if not redis.call('ZSCORE', account, member) then return end
  local size, response = string.match(member, '^(%d+)/(.*)$')
  local kept = left .. '/' .. response
  local change = left > 0 and left * redis.call('ZADD', account, redis.call('TIME')[1] + LOG_TTL_S, kept) or 0
  if kept ~= member then change = change - size * redis.call('ZREM', account, member) end
  redis.call('INCRBY', account .. ':bytes', change)
end

-- The response's last request has ended. booked: the fields account, size and keeps of its open hash.
local function close(response, open, booked, is_refused)
  local account, size, keeps = unpack(booked)
  redis.call('DEL', open)
  redis.call('UNLINK', prefix .. 'images:' .. response)
  local stored = prefix .. 'stored:' .. response
  if is_refused and redis.call('STRLEN', stored) > tonumber(keeps) then redis.call('UNLINK', stored) end
  redis.call('EXPIRE', stored, LOG_TTL_S)
  redis.call('EXPIRE', prefix .. 'response:' .. response, LOG_TTL_S)
  redis.call('EXPIRE', prefix .. 'reader:' .. response, LOG_TTL_S)
  release(account, size .. '/' .. response, redis.call('STRLEN', stored))
end

-- A request has ended: give its place back, once. inflight: the key of its model's hash;
-- is_refused: by an error of the client.
local function leave(inflight, request, is_refused)
  local tokens = redis.call('HGET', inflight, request)
  if not tokens then return end
  local response = string.match(request, '^(.*)%.') or request
  local open = prefix .. 'open:' .. response
  local booked = redis.call('HMGET', open, 'account', 'size', 'keeps')
  local account, shares = booked[1], prefix .. 'shares:' .. string.sub(inflight, #prefix + #'inflight:' + 1)
  redis.call('HDEL', inflight, request)
  redis.call('HINCRBY', inflight, '', -tokens)
  if account then
    redis.call('HINCRBY', shares, account .. ' tokens', -tokens)
    if redis.call('HINCRBY', shares, account, -1) <= 0 then redis.call('HDEL', shares, account, account .. ' tokens') end
  end
  if redis.call('HLEN', inflight) == 1 then redis.call('DEL', inflight, shares) end
  if redis.call('EXISTS', open) == 1 and redis.call('HINCRBY', open, 'left', -1) <= 0 then
    close(response, open, booked, is_refused)
  end
end
