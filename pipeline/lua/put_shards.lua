-- Put shards on the work queue. Answers 1, or 0 if another number of epochs was queued before or, where it must
-- be, the queue is not empty.
-- KEYS: shards, positions, epochs. ARGV: epochs before, epochs after, 1 if the queue must be empty, then
--   shard, position ...
local wrong = mistyped(KEYS[1], 'stream', KEYS[2], 'hash', KEYS[3], 'string')
if wrong then return wrong end
if (redis.call('GET', KEYS[3]) or '0') ~= ARGV[1] then return {'OK', 0} end
if ARGV[3] == '1' and (redis.call('XLEN', KEYS[1]) > 0 or redis.call('EXISTS', KEYS[2]) == 1) then
  return {'OK', 0}
end

if not has_group(KEYS[1]) then redis.call('XGROUP', 'CREATE', KEYS[1], 'learners', '0', 'MKSTREAM') end
for i = 4, #ARGV, 2 do
  local id = redis.call('XADD', KEYS[1], '*', 's', ARGV[i])
  if ARGV[i + 1] ~= '0' then redis.call('HSET', KEYS[2], id, ARGV[i + 1]) end
end
redis.call('SET', KEYS[3], ARGV[2])
return {'OK', 1}
