-- Ends a request without a token. Safe to repeat.
--
-- KEYS: log, inflight hash, reader hash
-- ARGV: a table (end_request in ends.lua), the event, a StepEvents message without events
-- include: wiring
-- include: give_back
-- include: log
-- include: ends

local log, inflight, reader = unpack(KEYS)
end_request(log, inflight, reader, cmsgpack.unpack(ARGV[1]), ARGV[2], ARGV[3])
