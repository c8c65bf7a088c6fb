-- Announce a complete upload of version 0, if the claim is still held.
-- KEYS: claim, initial. ARGV: nonce, upload, ttl in ms. Answers 1 if announced.
local wrong = mistyped(KEYS[1], 'string', KEYS[2], 'string')
if wrong then return wrong end
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {'OK', 0} end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return {'OK', 1}
