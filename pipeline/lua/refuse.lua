-- Refuse deltas: headers and payloads go, records go on the tape. Done once, it does nothing more.
-- KEYS: lease, head, deltas, tape, then the payloads that go.
-- ARGV: nonce, expected version, expected digest, lost tokens, number of header entries, the entries, number of
--   reasons, field of the head and count of each, then the tape records.
local lease, head, deltas, tape = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local entries = tonumber(ARGV[5])
local reasons = 6 + entries
local records = reasons + 1 + 2 * tonumber(ARGV[reasons])

local wrong = mistyped(lease, 'string', head, 'hash', tape, 'stream', deltas, 'stream')
if wrong then return wrong end
if redis.call('GET', lease) ~= ARGV[1] then return {'LEASE', lease} end
wrong = head_moved(head, ARGV[2], ARGV[3]) or bad_total(head, 'rejected_tokens', '0')
for i = reasons + 1, records - 1, 2 do wrong = wrong or bad_total(head, ARGV[i], ARGV[i + 1]) end
if wrong then return wrong end
-- A refusal is never refused for what a peer says that it lost.
local lost = bad_total(head, 'rejected_tokens', ARGV[4]) and '0' or ARGV[4]
local pending = entries == 0
for i = 6, 5 + entries do
  pending = pending or #redis.call('XRANGE', deltas, ARGV[i], ARGV[i]) > 0
end
if not pending then return {'OK'} end

redis.call('PERSIST', head)
for i = 6, 5 + entries do redis.call('XDEL', deltas, ARGV[i]) end
for i = 5, #KEYS do redis.call('UNLINK', KEYS[i]) end
redis.call('HINCRBY', head, 'rejected_tokens', lost)
for i = reasons + 1, records - 1, 2 do redis.call('HINCRBY', head, ARGV[i], ARGV[i + 1]) end
for i = records, #ARGV do redis.call('XADD', tape, '*', 'r', ARGV[i]) end
return {'OK'}
