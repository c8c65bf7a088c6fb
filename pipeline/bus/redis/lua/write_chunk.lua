-- Append a chunk to a payload that is still expiring, with its expiry in the same step, so that a sender killed
-- half-way leaves nothing for ever.
-- KEYS: payload. ARGV: index, ttl in ms, chunk.
local payload, index, ttl_ms, chunk = KEYS[1], tonumber(ARGV[1]), ARGV[2], ARGV[3]
local wrong = mistyped(payload, 'stream')
if wrong then return wrong end
local have = redis.call('XLEN', payload)
-- A commit made it stay: what it has is all of it, and it must not expire again.
local kept = have > 0 and redis.call('PTTL', payload) == -1
if index > have or (kept and index == have) then return {'PAYLOAD', payload, have} end

if index == have then redis.call('XADD', payload, string.format('%d-0', index + 1), 'c', chunk) end
if not kept then redis.call('PEXPIRE', payload, ttl_ms) end
return {'OK'}
