-- Take what nobody holds, or prolong what is held under the same nonce.
-- KEYS: holder. ARGV: nonce, ttl in ms. Answers 1 if held now.
local key, nonce, ttl_ms = KEYS[1], ARGV[1], ARGV[2]
local wrong = mistyped(key, 'string')
if wrong then return wrong end
local holder = redis.call('GET', key)
if holder == nonce then
  redis.call('PEXPIRE', key, ttl_ms)
  return {'OK', 1}
end
if holder then return {'OK', 0} end
redis.call('UNLINK', key)
redis.call('SET', key, nonce, 'PX', ttl_ms)
return {'OK', 1}
