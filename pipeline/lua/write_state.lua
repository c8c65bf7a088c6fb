-- Set the run's state unless that would move its phase backwards. Answers the state that holds.
-- KEYS: state. ARGV: rank of the phase, state.
local wrong = mistyped(KEYS[1], 'hash')
if wrong then return wrong end
local now = redis.call('HMGET', KEYS[1], 'rank', 'blob')
if now[1] and not now[1]:match('^%d+$') then return {'TOTAL', KEYS[1], 'rank'} end
if now[1] and tonumber(now[1]) > tonumber(ARGV[1]) then return {'OK', now[2]} end

redis.call('PERSIST', KEYS[1])
redis.call('HSET', KEYS[1], 'rank', ARGV[1], 'blob', ARGV[2])
return {'OK', ARGV[2]}
