-- Library: a tenant's limits. The limits a minute are buckets, full at first, that fill as time goes by;
-- `quota` is a hash of what is in them, and of the time of these numbers (ms).
--
-- limits, a table: requests_per_minute, tokens_per_minute, max_concurrency (nil: no such limit), and what
-- is to be charged: requests, tokens.

-- Returns what will be left [requests, tokens, ms], and, if a limit is exceeded, its kind ('requests',
-- 'tokens' or 'concurrency') and the ms to wait. running: the tenant's requests, a hash of the inflight
-- keys by request; num_more: those that would be added.
local function look_at_limits(quota, running, limits, num_more)
  local rpm, tpm, concurrency = limits.requests_per_minute, limits.tokens_per_minute, limits.max_concurrency
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  local requests, tokens, at = unpack(redis.call('HMGET', quota, 'requests', 'tokens', 'at'))
  at = tonumber(at) or now
  local minutes = math.max(now - at, 0) / 60000
  local function level(value, limit) return limit and math.min((tonumber(value) or limit) + minutes * limit, limit) or 0 end
  if at > now then redis.call('HSET', quota, 'at', now) end  -- Redis' clock went back: from here it fills again
  local left = {level(requests, rpm), level(tokens, tpm), now}
  if rpm and left[1] < limits.requests then return left, {'requests', math.ceil((limits.requests - left[1]) / rpm * 60000)} end
  if tpm and left[2] < limits.tokens then return left, {'tokens', math.ceil((limits.tokens - left[2]) / tpm * 60000)} end
  if concurrency and redis.call('HLEN', running) + num_more > concurrency then
    local fields = redis.call('HGETALL', running)
    for i = 1, #fields, 2 do  -- those that have ended do not count
      local request, inflight = fields[i], fields[i + 1]
      local is_here = string.sub(inflight, 1, 1) ~= '@'  -- else another cell knows: shared_limits.py
      if is_here and redis.call('HEXISTS', inflight, request) == 0 then redis.call('HDEL', running, request) end
    end
    if redis.call('HLEN', running) + num_more > concurrency then return left, {'concurrency', 1000} end
  end
  left[1], left[2] = left[1] - limits.requests, left[2] - limits.tokens
  return left, nil
end

-- Take what look_at_limits has found to be left.
local function charge(quota, limits, left)
  local requests, tokens = limits.requests_per_minute and left[1] or '', limits.tokens_per_minute and left[2] or ''
  redis.call('HSET', quota, 'requests', requests, 'tokens', tokens, 'at', left[3])
  redis.call('EXPIRE', quota, 120)  -- it is full after a minute
end
