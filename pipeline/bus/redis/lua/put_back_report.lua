-- Keep a report that was lost, stamped with the time at which it came; one that is there stays.
-- KEYS: learners, seen. ARGV: learner/incarnation, report, its age in ms.
local learners, seen = unpack(KEYS)
local name, report, age_ms = unpack(ARGV)
local wrong = mistyped(learners, 'hash', seen, 'hash')
if wrong then return wrong end
local time = redis.call('TIME')
if redis.call('HSETNX', learners, name, report) == 1 then
  redis.call('HSET', seen, name, string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000) - age_ms))
end
return {'OK'}
