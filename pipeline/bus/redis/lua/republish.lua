-- Have a fragment's head name other payloads of the same version: exactly once, or not at all.
-- KEYS: lease, head, tape (not written), then those that the fields below name by their places.
-- ARGV: a map of nonce, was, set, staged, replaced, replaced_ttl_ms and gone, as in `commit`.
local lease, head, tape = KEYS[1], KEYS[2], KEYS[3]
local refused = mistyped(lease, 'string', head, 'hash', tape, 'stream')
if refused then return refused end
local a = fields(tape)

refused = no_streams(a.staged)
if refused then return refused end
if redis.call('GET', lease) ~= a.nonce then return {'LEASE', lease} end
refused = head_moved(head, a.was) or incomplete(a.staged)
if refused then return refused end

for _, one in ipairs(a.staged) do redis.call('PERSIST', KEYS[one.key]) end
redis.call('HSET', head, unpack(a.set))
for _, key in ipairs(a.replaced) do redis.call('PEXPIRE', KEYS[key], a.replaced_ttl_ms) end
for _, key in ipairs(a.gone) do redis.call('UNLINK', KEYS[key]) end
return {'OK'}
