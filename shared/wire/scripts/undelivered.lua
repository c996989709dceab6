-- Library: entries of a stream that no consumer of a group has taken.

-- The id of the entry that was delivered last; nil: there is no such group. groups: XINFO GROUPS of the stream.
local function last_delivered(groups, group)
  for _, fields in ipairs(groups) do
    local about = {}
    for i = 1, #fields, 2 do about[fields[i]] = fields[i + 1] end
    if about.name == group then return about['last-delivered-id'] end
  end
end

-- The first `count` entries that wait. Makes the group if the stream has none: no replica has been there
-- since the stream began.
local function undelivered(stream, group, count)
  local groups = redis.pcall('XINFO', 'GROUPS', stream)
  if groups.err then return {} end  -- there is no stream
  local last = last_delivered(groups, group)
  if last then return redis.call('XRANGE', stream, '(' .. last, '+', 'COUNT', count) end
  redis.call('XGROUP', 'CREATE', stream, group, '0')
  return redis.call('XRANGE', stream, '-', '+', 'COUNT', count)
end
