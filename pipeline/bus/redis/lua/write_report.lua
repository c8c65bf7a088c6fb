-- Replace a learner's report by a newer one, stamped with the server's time. Answers the run's state.
-- KEYS: learners, seen, state, holder. ARGV: learner/incarnation, report, its number, generation, what the holder becomes.
local learners, seen, state, holder = unpack(KEYS)
local name, report, number, generation, claim = unpack(ARGV)
local wrong = mistyped(learners, 'hash', seen, 'hash', state, 'hash', holder, 'string')
if wrong then return wrong end
local time = redis.call('TIME')
-- Of all who have the learner's id, one is heard: the first of the greatest generation.
local held = redis.call('GET', holder) or ''
local theirs = held:match('^(%d+) %x+$')
if theirs and #theirs < 16 and tonumber(theirs) >= tonumber(generation) and held ~= claim then
  return {'HOLDER', holder, theirs}
end
-- A call that its sender gave up may be served after the next ones. One that is some dozens behind is no such
-- call: any learner may write another number here, which must not silence this one (LATE_REPORTS). Nor is what it
-- may write here unpacked in any size: some megabytes of empty arrays hold up the server for seconds, and take its
-- memory (LearnerReport.max_bytes).
local stored = redis.call('HGET', learners, name)
local readable, before = pcall(cmsgpack.unpack, stored and #stored <= 65536 and stored)
local last = readable and type(before) == 'table' and before.number
if type(last) == 'number' and last > tonumber(number) and last <= tonumber(number) + 64 then
  return {'OK', redis.call('HGET', state, 'blob')}
end

redis.call('PERSIST', learners)
if held ~= claim then redis.call('SET', holder, claim) end
redis.call('HSET', learners, name, report)
redis.call('HSET', seen, name, string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)))
return {'OK', redis.call('HGET', state, 'blob')}
