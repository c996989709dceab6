-- Writes a step: the logs, then the messages, if no log has refused its entry. So what compute acts on is
-- already durable. A log takes a token only behind the one before it, each position once, and nothing
-- behind an end.
--
-- KEYS: inflight hash
-- ARGV[1], a table (hundreds of commands a step would cost the client more than the whole decision):
--   [1]: entries, each [request id, position, event, is end]
--   [2]: messages, each [stream key, message]
--
-- Returns the entries that were refused, each [index from 1, what the log holds there, or as its end].
-- What it holds: [entry id, event]; nil: it has lost what came before; two empty strings: unknown, for the
-- entry follows a refused one in its log, on which it was computed.
-- include: wiring
-- include: give_back
-- include: log

local inflight, entries, messages = KEYS[1], unpack(cmsgpack.unpack(ARGV[1]))
local refused, is_cut = {}, {}
for i, entry in ipairs(entries) do
  local request, position, event, is_end = unpack(entry)
  local log = prefix .. 'log:' .. request
  local last, has_ended, last_id, last_event = last_of(log)
  local id = position .. '-0'
  if is_cut[log] then
    refused[#refused + 1] = {i, {'', ''}}
  elseif has_ended or last >= position then
    is_cut[log] = true
    local held = redis.call('XRANGE', log, id, id)[1]
    refused[#refused + 1] = {i, held and {id, held[2][2]} or {last_id, last_event}}
  elseif last < position - 1 then
    is_cut[log] = true
    refused[#refused + 1] = {i, false}
  elseif is_end then
    append_end(log, id, event, inflight, request)
  else
    redis.call('XADD', log, id, MESSAGE, event)
    if position == 1 then redis.call('EXPIRE', log, RUNNING_LOG_TTL_S) end
  end
end
if #refused == 0 then
  for _, message in ipairs(messages) do
    local stream = prefix .. message[1]
    redis.call('XADD', stream, '*', MESSAGE, message[2])
    redis.call('EXPIRE', stream, REPLICA_STREAM_TTL_S)
  end
end
return refused
