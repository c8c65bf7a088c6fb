-- Publish a window's state in the head, and a record on the tape.
-- KEYS: lease, head, tape. ARGV: nonce, window, tape record ('' for none).
local wrong = mistyped(KEYS[1], 'string', KEYS[2], 'hash', KEYS[3], 'stream')
if wrong then return wrong end
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {'LEASE', KEYS[1]} end
if redis.call('EXISTS', KEYS[2]) == 0 then return {'HEAD', KEYS[2]} end

redis.call('PERSIST', KEYS[2])
redis.call('HSET', KEYS[2], 'window', ARGV[2])
if ARGV[3] ~= '' then redis.call('XADD', KEYS[3], '*', 'r', ARGV[3]) end
return {'OK'}
