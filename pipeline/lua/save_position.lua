-- Remember how far a shard was read, while it is on the queue.
-- KEYS: shards, positions. ARGV: entry id, position.
local wrong = mistyped(KEYS[1], 'stream', KEYS[2], 'hash')
if wrong then return wrong end
if #redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1]) > 0 then redis.call('HSET', KEYS[2], ARGV[1], ARGV[2]) end
return {'OK'}
