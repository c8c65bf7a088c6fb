-- Refuse deltas: headers and payloads go, records go on the tape. Done once, it does nothing more.
-- KEYS: lease, head, deltas, tape, then the payloads that go.
-- ARGV: nonce, expected version, expected digest, lost tokens, number of header entries, the entries, then the tape records.
local lease, head, deltas, tape = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local entries = tonumber(ARGV[5])

local wrong = mistyped(lease, 'string', head, 'hash', tape, 'stream', deltas, 'stream')
if wrong then return wrong end
if redis.call('GET', lease) ~= ARGV[1] then return {'LEASE', lease} end
wrong = head_moved(head, ARGV[2], ARGV[3]) or bad_total(head, 'rejected_tokens', ARGV[4])
if wrong then return wrong end
local pending = entries == 0
for i = 6, 5 + entries do
  pending = pending or #redis.call('XRANGE', deltas, ARGV[i], ARGV[i]) > 0
end
if not pending then return {'OK'} end

redis.call('PERSIST', head)
for i = 6, 5 + entries do redis.call('XDEL', deltas, ARGV[i]) end
for i = 5, #KEYS do redis.call('UNLINK', KEYS[i]) end
redis.call('HINCRBY', head, 'rejected_tokens', ARGV[4])
for i = 6 + entries, #ARGV do redis.call('XADD', tape, '*', 'r', ARGV[i]) end
return {'OK'}
