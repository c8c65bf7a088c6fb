-- Announce a complete upload, if its claim is still held.
-- KEYS: claim, where it is announced, then the keys that go with that. ARGV: nonce, upload, ttl in ms.
-- Answers 1 if announced.
for i = 1, #KEYS do
  local wrong = mistyped(KEYS[i], 'string')
  if wrong then return wrong end
end
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {'OK', 0} end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
for i = 3, #KEYS do redis.call('UNLINK', KEYS[i]) end
return {'OK', 1}
