-- Publish a window's state in the head, and a record on the tape.
-- KEYS: lease, head, tape. ARGV: nonce, expected version, expected digest, window, tape record ('' for none).
local wrong = mistyped(KEYS[1], 'string', KEYS[2], 'hash', KEYS[3], 'stream')
if wrong then return wrong end
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return {'LEASE', KEYS[1]} end
wrong = head_moved(KEYS[2], ARGV[2], ARGV[3])
if wrong then return wrong end

redis.call('PERSIST', KEYS[2])
redis.call('HSET', KEYS[2], 'window', ARGV[4])
if ARGV[5] ~= '' then redis.call('XADD', KEYS[3], '*', 'r', ARGV[5]) end
return {'OK'}
