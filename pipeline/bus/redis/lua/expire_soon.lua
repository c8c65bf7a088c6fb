-- Let a payload that is about to expire go sooner; one that stays, stays.
-- KEYS: payload. ARGV: ttl in ms.
if redis.call('PTTL', KEYS[1]) > tonumber(ARGV[1]) then redis.call('PEXPIRE', KEYS[1], ARGV[1]) end
return {'OK'}
