-- Set the run's state unless that would move its phase backwards. Answers the state that holds.
-- KEYS: state. ARGV: rank of the phase, state.
local state, rank, blob = KEYS[1], ARGV[1], ARGV[2]
local wrong = mistyped(state, 'hash')
if wrong then return wrong end
local rank_now, blob_now = unpack(redis.call('HMGET', state, 'rank', 'blob'))
if rank_now and not rank_now:match('^%d+$') then return {'TOTAL', state, 'rank'} end
if rank_now and tonumber(rank_now) > tonumber(rank) then return {'OK', blob_now} end

redis.call('PERSIST', state)
redis.call('HSET', state, 'rank', rank, 'blob', blob)
return {'OK', blob}
