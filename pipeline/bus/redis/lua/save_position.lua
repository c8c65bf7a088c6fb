-- Remember how far a shard was read, if its holder says so and it is further than known. Also where memory is short.
-- KEYS: shards, positions. ARGV: consumer, entry id, position.
local shards, positions = unpack(KEYS)
local consumer, entry, position = unpack(ARGV)
local wrong = mistyped(shards, 'stream', positions, 'hash')
if wrong then return wrong end
if not holds(shards, consumer, entry) then return {'OK'} end
if number(redis.call('HGET', positions, entry)) >= tonumber(position) then return {'OK'} end

redis.call('PERSIST', positions)
redis.call('HSET', positions, entry, position)
return {'OK'}
