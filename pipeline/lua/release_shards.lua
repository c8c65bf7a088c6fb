-- Give back all shards of a consumer: the next claim finds them as if their holder were gone.
-- KEYS: shards. ARGV: consumer.
local wrong = mistyped(KEYS[1], 'stream')
if wrong then return wrong end
if not has_group(KEYS[1]) then return {'OK'} end
local count = 0
for _, holder in ipairs(redis.call('XPENDING', KEYS[1], 'learners')[4] or {}) do
  if holder[1] == ARGV[1] then count = holder[2] end
end
if count == 0 then return {'OK'} end

for _, held in ipairs(redis.call('XPENDING', KEYS[1], 'learners', '-', '+', count, ARGV[1])) do
  redis.call('XCLAIM', KEYS[1], 'learners', RELEASED, 0, held[1], 'JUSTID')
end
return {'OK'}
