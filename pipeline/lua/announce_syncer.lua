-- Say that a syncer is here until its time is over; those whose time is over go. Answers the nonces of all that are.
-- KEYS: syncers. ARGV: nonce, name, ttl in ms.
local wrong = mistyped(KEYS[1], 'hash')
if wrong then return wrong end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local found, live = redis.call('HGETALL', KEYS[1]), {ARGV[1]}

redis.call('PERSIST', KEYS[1])
for i = 1, #found, 2 do
  local until_ms = found[i + 1]:match('^(%d+) ')
  if not until_ms or tonumber(until_ms) <= now_ms then
    redis.call('HDEL', KEYS[1], found[i])
  elseif found[i] ~= ARGV[1] then
    live[#live + 1] = found[i]
  end
end
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f %s', now_ms + ARGV[3], ARGV[2]))
return {'OK', live}
