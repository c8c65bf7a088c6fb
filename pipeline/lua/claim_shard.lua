-- Take the next shard that nobody holds. Answers entry id, shard, position; or nothing.
-- KEYS: shards, positions. ARGV: consumer.
local wrong = mistyped(KEYS[1], 'stream', KEYS[2], 'hash')
if wrong then return wrong end
if not has_group(KEYS[1]) then return {'OK'} end
local found = redis.call('XREADGROUP', 'GROUP', 'learners', ARGV[1], 'COUNT', '1', 'STREAMS', KEYS[1], '>')
if not found then return {'OK'} end
local entry = found[1][2][1]
return {'OK', entry[1], entry[2][2], redis.call('HGET', KEYS[2], entry[1])}
