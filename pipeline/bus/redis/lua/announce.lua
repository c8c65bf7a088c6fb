-- Announce a complete upload, if its claim is still held.
-- KEYS: claim, where it is announced, then the keys that go with that. ARGV: nonce, upload, ttl in ms.
-- Answers 1 if announced.
local claim, announced = KEYS[1], KEYS[2]
local nonce, upload, ttl_ms = unpack(ARGV)
for _, key in ipairs(KEYS) do
  local wrong = mistyped(key, 'string')
  if wrong then return wrong end
end
if redis.call('GET', claim) ~= nonce then return {'OK', 0} end
redis.call('SET', announced, upload, 'PX', ttl_ms)
for i = 3, #KEYS do redis.call('UNLINK', KEYS[i]) end
return {'OK', 1}
