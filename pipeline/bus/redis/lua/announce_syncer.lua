-- Say that a syncer is here until its time is over; those whose time is over go. Answers the nonces of all that are.
-- KEYS: syncers. ARGV: nonce; saved tokens, name and page; ttl in ms.
local syncers = KEYS[1]
local nonce, name, ttl_ms = unpack(ARGV)
local wrong = mistyped(syncers, 'hash')
if wrong then return wrong end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local found, live = redis.call('HGETALL', syncers), {nonce}

redis.call('PERSIST', syncers)
for i = 1, #found, 2 do
  local until_ms = found[i + 1]:match('^(%d+) ')
  if not until_ms or tonumber(until_ms) <= now_ms then
    redis.call('HDEL', syncers, found[i])
  elseif found[i] ~= nonce then
    live[#live + 1] = found[i]
  end
end
redis.call('HSET', syncers, nonce, string.format('%.0f %s', now_ms + ttl_ms, name))
return {'OK', live}
