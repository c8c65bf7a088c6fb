-- The work queue as it is at one moment: epochs, entries, positions.
-- KEYS: shards, positions, epochs.
local wrong = mistyped(KEYS[1], 'stream', KEYS[2], 'hash', KEYS[3], 'string')
if wrong then return wrong end
return {'OK', redis.call('GET', KEYS[3]), redis.call('XRANGE', KEYS[1], '-', '+'), redis.call('HGETALL', KEYS[2])}
