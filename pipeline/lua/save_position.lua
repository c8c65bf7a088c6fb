-- Remember how far a shard was read, if its holder says so and it is further than known. Also where memory is short.
-- KEYS: shards, positions. ARGV: consumer, entry id, position.
local wrong = mistyped(KEYS[1], 'stream', KEYS[2], 'hash')
if wrong then return wrong end
if not holds(KEYS[1], ARGV[1], ARGV[2]) then return {'OK'} end
local known = redis.call('HGET', KEYS[2], ARGV[2]) or '0'
if not known:match('^%d+$') then return {'TOTAL', KEYS[2], ARGV[2]} end
if tonumber(known) >= tonumber(ARGV[3]) then return {'OK'} end

redis.call('PERSIST', KEYS[2])
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
return {'OK'}
