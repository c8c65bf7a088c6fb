-- Replace a learner's report, stamped with the server's time. Answers the run's state.
-- KEYS: learners, seen, state. ARGV: learner/incarnation, report.
local wrong = mistyped(KEYS[1], 'hash', KEYS[2], 'hash', KEYS[3], 'hash')
if wrong then return wrong end
local time = redis.call('TIME')

redis.call('PERSIST', KEYS[1])
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('HSET', KEYS[2], ARGV[1], string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)))
return {'OK', redis.call('HGET', KEYS[3], 'blob')}
