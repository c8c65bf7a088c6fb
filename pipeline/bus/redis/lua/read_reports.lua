-- All reports as they were at one moment: the server's time in ms, learners, seen.
-- KEYS: learners, seen.
local time = redis.call('TIME')
local now_ms = string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))
return {'OK', now_ms, redis.call('HGETALL', KEYS[1]), redis.call('HGETALL', KEYS[2])}
