-- Library: messages to every replica. Needs wiring.

-- Append to the control stream, and drop what every replica has long had the chance to read: by age, never
-- by length.
local function broadcast(control, message)
  local WINDOW_S = 600
  redis.call('XADD', control, '*', MESSAGE, message)
  redis.call('XTRIM', control, 'MINID', (redis.call('TIME')[1] - WINDOW_S) * 1000)
  redis.call('EXPIRE', control, 2 * WINDOW_S)
end
