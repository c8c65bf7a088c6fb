-- Publish a window's state in the head, and a record on the tape.
-- KEYS: lease, head, tape. ARGV: nonce, expected version, expected digest, window, tape record ('' for none).
local lease, head, tape = unpack(KEYS)
local nonce, version, digest, window, record = unpack(ARGV)
local refused = mistyped(lease, 'string', head, 'hash', tape, 'stream')
if refused then return refused end
if redis.call('GET', lease) ~= nonce then return {'LEASE', lease} end
refused = head_moved(head, {version = version, digest = digest})
if refused then return refused end

redis.call('PERSIST', head)
redis.call('HSET', head, 'window', window)
if record ~= '' then redis.call('XADD', tape, '*', 'r', record) end
return {'OK'}
