-- Put shards on the work queue. Answers 1, or 0 if another number of epochs was queued before or, where it must
-- be, the queue is not empty.
-- KEYS: shards, positions, epochs. ARGV: epochs before, epochs after, 1 if the queue must be empty, then
--   shard, position ...
local shards, positions, epochs = unpack(KEYS)
local before, after, only_if_empty = ARGV[1], ARGV[2], ARGV[3] == '1'
local wrong = mistyped(shards, 'stream', positions, 'hash', epochs, 'string')
if wrong then return wrong end
if number(redis.call('GET', epochs)) ~= tonumber(before) then return {'OK', 0} end
if only_if_empty and (redis.call('XLEN', shards) > 0 or redis.call('EXISTS', positions) == 1) then return {'OK', 0} end

if not has_group(shards) then redis.call('XGROUP', 'CREATE', shards, 'learners', '0', 'MKSTREAM') end
for i = 4, #ARGV, 2 do
  local shard, position = ARGV[i], ARGV[i + 1]
  local id = redis.call('XADD', shards, '*', 's', shard)
  if position ~= '0' then redis.call('HSET', positions, id, position) end
end
redis.call('SET', epochs, after)
return {'OK', 1}
