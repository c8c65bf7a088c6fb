-- Acknowledge a shard, if its holder says so: it leaves the queue.
-- KEYS: shards, positions. ARGV: consumer, entry id.
local wrong = mistyped(KEYS[1], 'stream', KEYS[2], 'hash')
if wrong then return wrong end
if not holds(KEYS[1], ARGV[1], ARGV[2]) then return {'OK'} end

redis.call('XACK', KEYS[1], 'learners', ARGV[2])
redis.call('XDEL', KEYS[1], ARGV[2])
redis.call('HDEL', KEYS[2], ARGV[2])
return {'OK'}
