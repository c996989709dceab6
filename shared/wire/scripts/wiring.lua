-- What scripts share of shared/wire/streams.py: fields, lifetimes (s), and the keys that they make themselves.
-- tests/wire/test_scripts.py compares the two.

local MESSAGE, REQUEST_ID, GATEWAY_ID = 'm', 'r', 'g'
local LOG_TTL_S, RUNNING_LOG_TTL_S, REPLICA_STREAM_TTL_S = 3600, 604800, 600

-- what stands before every key of this cell, and so before the first of KEYS
local prefix = string.match(KEYS[1], '^{[^}]*}:') or ''

local function response_of(request) return string.match(request, '^(.*)%.') or request end
local function log_key(request) return prefix .. 'log:' .. request end
local function response_key(response) return prefix .. 'response:' .. response end
local function stored_key(response) return prefix .. 'stored:' .. response end
local function open_key(response) return prefix .. 'open:' .. response end
