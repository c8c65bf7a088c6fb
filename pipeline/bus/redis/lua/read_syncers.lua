-- Syncers as they were at one moment: the server's time in ms, then nonces and what is stored of each.
-- KEYS: syncers.
local wrong = mistyped(KEYS[1], 'hash')
if wrong then return wrong end
local time = redis.call('TIME')
local now_ms = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
return {'OK', now_ms, redis.call('HGETALL', KEYS[1])}
