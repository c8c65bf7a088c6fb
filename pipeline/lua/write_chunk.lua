-- Append a chunk to a payload that is still expiring, with its expiry in the same step, so that a sender killed
-- half-way leaves nothing for ever.
-- KEYS: payload. ARGV: index, ttl in ms, chunk.
local wrong = mistyped(KEYS[1], 'stream')
if wrong then return wrong end
local index, have = tonumber(ARGV[1]), redis.call('XLEN', KEYS[1])
-- A commit made it stay: what it has is all of it, and it must not expire again.
local kept = have > 0 and redis.call('PTTL', KEYS[1]) == -1
if index > have or (kept and index == have) then return {'PAYLOAD', KEYS[1], have} end

if index == have then redis.call('XADD', KEYS[1], string.format('%d-0', index + 1), 'c', ARGV[3]) end
if not kept then redis.call('PEXPIRE', KEYS[1], ARGV[2]) end
return {'OK'}
