-- Acknowledge a shard: it leaves the queue.
-- KEYS: shards, positions. ARGV: entry id.
local wrong = mistyped(KEYS[1], 'stream', KEYS[2], 'hash')
if wrong then return wrong end
if has_group(KEYS[1]) then redis.call('XACK', KEYS[1], 'learners', ARGV[1]) end
redis.call('XDEL', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
return {'OK'}
