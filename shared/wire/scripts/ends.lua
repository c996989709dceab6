-- Library: ends without a token. Needs wiring, give_back and log.

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
