-- What is asked for and offered of moments, none of it for longer than it can be.
-- KEYS: wish, claim, offer. ARGV: ttl of each at most, in ms, bytes of wish and claim at most, bytes of the offer at most.
-- Answers the three.
for _, key in ipairs(KEYS) do
  local wrong = mistyped(key, 'string')
  if wrong then return wrong end
end
for _, key in ipairs(KEYS) do bound(key, ARGV[1]) end
local function value(key, max_bytes)
  local found = redis.call('GET', key)
  return found and (#found <= tonumber(max_bytes) and found or '') -- which cannot be read either
end
return {'OK', value(KEYS[1], ARGV[2]), value(KEYS[2], ARGV[2]), value(KEYS[3], ARGV[3])}
