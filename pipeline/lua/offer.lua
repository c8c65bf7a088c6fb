-- Append a header to its learner's stream of a fragment, and have the owner look there. Answers the entry id.
-- KEYS: deltas, senders, arrivals. ARGV: learner, header.
local wrong = mistyped(KEYS[1], 'stream', KEYS[2], 'hash', KEYS[3], 'stream')
if wrong then return wrong end

local id = redis.call('XADD', KEYS[1], '*', 'h', ARGV[2])
-- Any learner may have used up the ids of the arrivals: then owners see who is new a little later.
if redis.call('HSETNX', KEYS[2], ARGV[1], '') == 1 then
  redis.pcall('XADD', KEYS[3], 'MAXLEN', 1, '*', 'l', ARGV[1])
end
return {'OK', id}
