-- Sends a message to every replica.
--
-- KEYS: control stream
-- ARGV: the message
-- include: wiring
-- include: control

broadcast(KEYS[1], ARGV[1])
