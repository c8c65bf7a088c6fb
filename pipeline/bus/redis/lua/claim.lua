-- Take what nobody holds, or prolong what is held under the same nonce.
-- Another's that would be held for longer than anybody's may be, or for ever, ends after this ttl.
-- KEYS: holder. ARGV: nonce, ttl in ms, ms that anybody's may last. Answers 1 if held now.
local key, nonce, ttl_ms, most_ms = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local wrong = mistyped(key, 'string')
if wrong then return wrong end
local holder = redis.call('GET', key)
if holder == nonce then
  redis.call('PEXPIRE', key, ttl_ms)
  return {'OK', 1}
end
bound(key, most_ms, ttl_ms)
if holder then return {'OK', 0} end
redis.call('UNLINK', key)
redis.call('SET', key, nonce, 'PX', ttl_ms)
return {'OK', 1}
