-- Removes consumers that are not alive, are idle, and have nothing pending. A script, because a consumer
-- might be given an entry between a look and the removal, and Redis forgets a removed consumer's entries.
--
-- KEYS: group stream
-- ARGV: group, idle ms, then the consumers that stay

local stream, group, idle_ms = KEYS[1], ARGV[1], tonumber(ARGV[2])
local stays = {}
for i = 3, #ARGV do stays[ARGV[i]] = true end
for _, fields in ipairs(redis.call('XINFO', 'CONSUMERS', stream, group)) do
  local consumer = {}
  for i = 1, #fields, 2 do consumer[fields[i]] = fields[i + 1] end
  if not stays[consumer.name] and consumer.pending == 0 and consumer.idle > idle_ms then
    redis.call('XGROUP', 'DELCONSUMER', stream, group, consumer.name)
  end
end
