-- Delivers the last entry of the stream of prompts to a replica, if it lives, and if no entry before this
-- one waits: reading gives it if it is the only one.
--
-- KEYS: prompts stream, offers, the replica's stream of offers
-- ARGV[1], a table:
--   group: of the prompts; replica: its id
--   announcement: the key of what it says of itself (not among KEYS: a tokenizer may only read it, and must
--     be allowed to write a script's keys)
--   wait_ms: then any replica may take the entry
--   tag, version: of an Offer message
-- include: wiring
-- include: offers
-- include: undelivered

local MAX_OFFERED = 1024  -- in a replica's stream: what is older was taken up or stolen long ago
local OFFERS_TTL_S = 3600  -- past the last offer
local stream, offers, offered = unpack(KEYS)
local asked = cmsgpack.unpack(ARGV[1])
if redis.call('EXISTS', prefix .. asked.announcement) == 0 then return end
local last = last_delivered(redis.call('XINFO', 'GROUPS', stream), asked.group)
local waiting = last and redis.call('XRANGE', stream, '(' .. last, '+', 'COUNT', 2) or {}
if #waiting ~= 1 then return end
local id = waiting[1][1]
-- a full Redis refuses the hint: pcall, for an error here would have the whole transaction repeated
local hint = redis.pcall('ZADD', offers, now_ms() + asked.wait_ms, id .. '/' .. asked.replica)
if type(hint) == 'table' then return end
redis.call('EXPIRE', offers, OFFERS_TTL_S)
redis.call('XREADGROUP', 'GROUP', asked.group, asked.replica, 'COUNT', 1, 'STREAMS', stream, '>')
redis.pcall('XADD', offered, 'MAXLEN', '~', MAX_OFFERED, '*', MESSAGE, cmsgpack.pack({asked.tag, asked.version, id}))
redis.call('EXPIRE', offered, REPLICA_STREAM_TTL_S)
