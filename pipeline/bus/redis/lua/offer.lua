-- Append a header to its learner's stream of a fragment, and have the owner look there. Answers the entry id.
-- KEYS: deltas, senders, arrivals. ARGV: learner, header, the entry that it renews (may be left out).
local deltas, senders, arrivals = unpack(KEYS)
local learner, header, renews = unpack(ARGV)
local wrong = mistyped(deltas, 'stream', senders, 'hash', arrivals, 'stream')
if wrong then return wrong end

local id = redis.call('XADD', deltas, '*', 'h', header)
-- A file of users from before renewals has no XDEL: the owner then refuses the earlier one as a duplicate.
-- One that another server had may have had the very id that this server gives now.
if renews and renews ~= id then redis.pcall('XDEL', deltas, renews) end
-- Any learner may have used up the ids of the arrivals: then owners see who is new a little later.
if redis.call('HSETNX', senders, learner, '') == 1 then
  redis.pcall('XADD', arrivals, 'MAXLEN', 1, '*', 'l', learner)
end
return {'OK', id}
