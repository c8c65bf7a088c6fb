-- Give back all shards of a consumer: the next claim finds them as if their holder were gone.
-- KEYS: shards. ARGV: consumer.
local shards, consumer = KEYS[1], ARGV[1]
local wrong = mistyped(shards, 'stream')
if wrong then return wrong end
if not has_group(shards) then return {'OK'} end
local count = 0
for _, holder in ipairs(redis.call('XPENDING', shards, 'learners')[4] or {}) do
  if holder[1] == consumer then count = holder[2] end
end
if count == 0 then return {'OK'} end

for _, held in ipairs(redis.call('XPENDING', shards, 'learners', '-', '+', count, consumer)) do
  redis.call('XCLAIM', shards, 'learners', RELEASED, 0, held[1], 'JUSTID')
end
return {'OK'}
