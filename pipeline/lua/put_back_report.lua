-- Keep a report that was lost, stamped with the time at which it came; one that is there stays.
-- KEYS: learners, seen. ARGV: learner/incarnation, report, its age in ms.
local wrong = mistyped(KEYS[1], 'hash', KEYS[2], 'hash')
if wrong then return wrong end
local time = redis.call('TIME')
if redis.call('HSETNX', KEYS[1], ARGV[1], ARGV[2]) == 1 then
  redis.call('HSET', KEYS[2], ARGV[1], string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000) - ARGV[3]))
end
return {'OK'}
