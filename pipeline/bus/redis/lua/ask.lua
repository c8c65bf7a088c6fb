-- Set a wish, unless there is one.
-- KEYS: wish. ARGV: who asks, ttl in ms.
local wrong = mistyped(KEYS[1], 'string')
if wrong then return wrong end
if redis.call('EXISTS', KEYS[1]) == 0 then redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) end
return {'OK'}
