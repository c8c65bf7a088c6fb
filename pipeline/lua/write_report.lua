-- Replace a learner's report by a newer one, stamped with the server's time. Answers the run's state.
-- KEYS: learners, seen, state, holder. ARGV: learner/incarnation, report, its number, generation, what the holder becomes.
local wrong = mistyped(KEYS[1], 'hash', KEYS[2], 'hash', KEYS[3], 'hash', KEYS[4], 'string')
if wrong then return wrong end
local time = redis.call('TIME')
-- Of all who have the learner's id, one is heard: the first of the greatest generation.
local holder = redis.call('GET', KEYS[4]) or ''
local generation = holder:match('^(%d+) %x+$')
if generation and #generation < 16 and tonumber(generation) >= tonumber(ARGV[4]) and holder ~= ARGV[5] then
  return {'HOLDER', KEYS[4], generation}
end
-- A call that its sender gave up may be served after the next one.
local readable, before = pcall(cmsgpack.unpack, redis.call('HGET', KEYS[1], ARGV[1]))
local number = readable and type(before) == 'table' and before.number
if type(number) == 'number' and number > tonumber(ARGV[3]) then return {'OK', redis.call('HGET', KEYS[3], 'blob')} end

redis.call('PERSIST', KEYS[1])
if holder ~= ARGV[5] then redis.call('SET', KEYS[4], ARGV[5]) end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('HSET', KEYS[2], ARGV[1], string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)))
return {'OK', redis.call('HGET', KEYS[3], 'blob')}
