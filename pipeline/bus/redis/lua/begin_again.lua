-- Set the state of a run that is finished, to an earlier phase. Answers 1 if it was finished.
-- KEYS: state. ARGV: rank of a finished run's phase, rank of the new one, state.
local state, finished, rank, blob = KEYS[1], ARGV[1], ARGV[2], ARGV[3]
local wrong = mistyped(state, 'hash')
if wrong then return wrong end
if redis.call('HGET', state, 'rank') ~= finished then return {'OK', 0} end

redis.call('PERSIST', state)
redis.call('HSET', state, 'rank', rank, 'blob', blob)
return {'OK', 1}
