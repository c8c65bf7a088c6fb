-- Refuse deltas: headers and payloads go, records go on the tape. Done once, it does nothing more.
-- KEYS: lease, head, tape, the learners' streams that headers go from, then the payloads that go.
-- ARGV: nonce, expected version, expected digest, lost tokens, number of streams, number of headers, stream (from 0) and
--   entry of each, number of reasons, field of the head and count of each, then the tape records.
local lease, head, tape = KEYS[1], KEYS[2], KEYS[3]
local streams, headers = tonumber(ARGV[5]), tonumber(ARGV[6])
local reasons = 7 + 2 * headers
local records = reasons + 1 + 2 * tonumber(ARGV[reasons])

local wrong = mistyped(lease, 'string', head, 'hash', tape, 'stream')
for i = 4, 3 + streams do wrong = wrong or mistyped(KEYS[i], 'stream') end
if wrong then return wrong end
if redis.call('GET', lease) ~= ARGV[1] then return {'LEASE', lease} end
wrong = head_moved(head, ARGV[2], ARGV[3]) or bad_total(head, 'rejected_tokens', '0')
for i = reasons + 1, records - 1, 2 do wrong = wrong or bad_total(head, ARGV[i], ARGV[i + 1]) end
if wrong then return wrong end
-- A refusal is never refused for what a peer says that it lost.
local lost = bad_total(head, 'rejected_tokens', ARGV[4]) and '0' or ARGV[4]
local pending = headers == 0
for i = 7, reasons - 1, 2 do
  pending = pending or #redis.call('XRANGE', KEYS[4 + ARGV[i]], ARGV[i + 1], ARGV[i + 1]) > 0
end
if not pending then return {'OK'} end

redis.call('PERSIST', head)
for i = 7, reasons - 1, 2 do redis.call('XDEL', KEYS[4 + ARGV[i]], ARGV[i + 1]) end
for i = 4 + streams, #KEYS do redis.call('UNLINK', KEYS[i]) end
redis.call('HINCRBY', head, 'rejected_tokens', lost)
for i = reasons + 1, records - 1, 2 do redis.call('HINCRBY', head, ARGV[i], ARGV[i + 1]) end
for i = records, #ARGV do redis.call('XADD', tape, '*', 'r', ARGV[i]) end
return {'OK'}
