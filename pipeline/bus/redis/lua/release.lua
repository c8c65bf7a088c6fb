-- Give back what is held under this nonce.
-- KEYS: holder. ARGV: nonce.
local wrong = mistyped(KEYS[1], 'string')
if wrong then return wrong end
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('UNLINK', KEYS[1]) end
return {'OK'}
