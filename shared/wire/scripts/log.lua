-- Library: token logs. The token at position p has the entry `p-0`; an end without a token after p tokens
-- has `p-1`. An entry that ends its request has a second field. Needs wiring and give_back.

-- The last entry of a log: position (0: there is none), whether the request has ended, entry id, event.
local function last_of(log)
  local last = redis.call('XREVRANGE', log, '+', '-', 'COUNT', 1)[1]
  if not last then return 0, false end
  return tonumber(string.match(last[1], '^%d+')), #last[2] > 2, last[1], last[2][2]
end

-- Append the entry that ends a request, and give its place back.
local function append_end(log, id, event, inflight, request, is_refused)
  redis.call('XADD', log, id, MESSAGE, event, 'e', '1')
  redis.call('EXPIRE', log, LOG_TTL_S)
  leave(inflight, request, is_refused)
end

-- End a request without a token, after those that its log holds. A log that has an end keeps it. The event
-- of the log's end goes to the gateway that reads the response, in fields of its own: its position is the
-- log's, and stands in no event that was encoded before.
-- asked, a table: request; gateway: reads the response if no other has resumed it (''; none does);
-- is_refused: by an error of the client. message: a StepEvents without events, with what goes with this one.
local function end_request(log, inflight, reader, asked, event, message)
  local position, has_ended, _, first_end = last_of(log)
  if has_ended then
    event = first_end
    leave(inflight, asked.request)
  else
    append_end(log, position .. '-1', event, inflight, asked.request, asked.is_refused)
  end
  local gateway = redis.call('HGET', reader, 'gateway') or asked.gateway
  if gateway == '' then return end
  local stream = prefix .. 'events:' .. gateway
  redis.call('XADD', stream, '*', MESSAGE, message, 'e', event, 'p', position)
  redis.call('EXPIRE', stream, REPLICA_STREAM_TTL_S)
end
