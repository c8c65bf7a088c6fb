-- Take what nobody holds, or prolong what is held under the same nonce.
-- KEYS: holder. ARGV: nonce, ttl in ms, 1 if any learner may write the holder. Answers 1 if held now.
local key, nonce, ttl_ms, shared = KEYS[1], ARGV[1], ARGV[2], ARGV[3] == '1'
local wrong = mistyped(key, 'string')
if wrong then return wrong end
local holder = redis.call('GET', key)
if holder == nonce then
  redis.call('PEXPIRE', key, ttl_ms)
  return {'OK', 1}
end
if shared then bound(key, ttl_ms) end
if holder then return {'OK', 0} end
redis.call('UNLINK', key)
redis.call('SET', key, nonce, 'PX', ttl_ms)
return {'OK', 1}
