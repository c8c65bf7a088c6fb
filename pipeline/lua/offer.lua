-- Append a header to its learner's stream of a fragment, and have the owner look there. Answers the entry id.
-- KEYS: deltas, senders. ARGV: learner, header.
local wrong = mistyped(KEYS[1], 'stream', KEYS[2], 'hash')
if wrong then return wrong end

local id = redis.call('XADD', KEYS[1], '*', 'h', ARGV[2])
redis.call('HSETNX', KEYS[2], ARGV[1], '')
return {'OK', id}
