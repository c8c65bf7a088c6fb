-- Let a payload that is about to expire live on; one that stays, stays.
-- KEYS: payload. ARGV: ttl in ms.
local left = redis.call('PTTL', KEYS[1])
if left >= 0 and left < tonumber(ARGV[1]) then redis.call('PEXPIRE', KEYS[1], ARGV[1]) end
return {'OK'}
