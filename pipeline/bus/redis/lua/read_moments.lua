-- What is asked for and offered of moments, none of it for longer than it can be.
-- KEYS: wish, claim, offer. ARGV: most ttl of each, in ms. Answers the three.
for _, key in ipairs(KEYS) do
  local wrong = mistyped(key, 'string')
  if wrong then return wrong end
end
for _, key in ipairs(KEYS) do bound(key, ARGV[1]) end
return {'OK', redis.call('GET', KEYS[1]), redis.call('GET', KEYS[2]), redis.call('GET', KEYS[3])}
