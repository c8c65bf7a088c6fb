-- Take what nobody holds, or prolong what is held under the same nonce.
-- KEYS: holder. ARGV: nonce, ttl in ms. Answers 1 if held now.
local wrong = mistyped(KEYS[1], 'string')
if wrong then return wrong end
local holder = redis.call('GET', KEYS[1])
if holder == ARGV[1] then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return {'OK', 1}
end
if holder then return {'OK', 0} end
redis.call('UNLINK', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {'OK', 1}
