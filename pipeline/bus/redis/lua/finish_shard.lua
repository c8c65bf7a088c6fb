-- Acknowledge a shard, if its holder says so: it leaves the queue.
-- KEYS: shards, positions. ARGV: consumer, entry id.
local shards, positions = unpack(KEYS)
local consumer, entry = unpack(ARGV)
local wrong = mistyped(shards, 'stream', positions, 'hash')
if wrong then return wrong end
if not holds(shards, consumer, entry) then return {'OK'} end

redis.call('XACK', shards, 'learners', entry)
redis.call('XDEL', shards, entry)
redis.call('HDEL', positions, entry)
return {'OK'}
