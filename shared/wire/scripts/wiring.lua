-- Library: what scripts share of shared/wire/streams.py, fields and lifetimes (s), and the prefix of the keys
-- that they make themselves. tests/wire/test_scripts.py compares the two.

local MESSAGE, REQUEST_ID, GATEWAY_ID = 'm', 'r', 'g'
local LOG_TTL_S, RUNNING_LOG_TTL_S, REPLICA_STREAM_TTL_S = 3600, 604800, 600

-- what stands before every key of this cell, and so before the first of KEYS
local prefix = string.match(KEYS[1], '^{[^}]*}:') or ''
