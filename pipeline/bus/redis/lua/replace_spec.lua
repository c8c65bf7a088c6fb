-- Put a spec in the place of another. Answers 1 if that was the one that held.
-- KEYS: spec. ARGV: spec, the one before.
local wrong = mistyped(KEYS[1], 'string')
if wrong then return wrong end
if redis.call('GET', KEYS[1]) ~= ARGV[2] then return {'OK', 0} end
redis.call('SET', KEYS[1], ARGV[1])
return {'OK', 1}
