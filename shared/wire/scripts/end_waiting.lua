-- Ends a request that no replica has taken: takes its entry as the group's next reader would, so that no
-- other gets it. Entries are never deleted before they are delivered, for Redis would lose count of the
-- group's lag. If a replica has taken the entry, nothing happens.
--
-- KEYS: log, inflight hash, reader hash, group stream
-- ARGV: a table (end_request in ends.lua, and group, consumer, entry), the event, a StepEvents message
--   without events
-- include: wiring
-- include: give_back
-- include: log
-- include: ends
-- include: undelivered

local log, inflight, reader, stream = unpack(KEYS)
local asked = cmsgpack.unpack(ARGV[1])
local first = undelivered(stream, asked.group, 1)[1]
if not first or first[1] ~= asked.entry then return end
redis.call('XREADGROUP', 'GROUP', asked.group, asked.consumer, 'COUNT', 1, 'STREAMS', stream, '>')
redis.call('XACK', stream, asked.group, asked.entry)
redis.call('XDEL', stream, asked.entry)
end_request(log, inflight, reader, asked, ARGV[2], ARGV[3])
