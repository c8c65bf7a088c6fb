-- Move a fragment's head: exactly once, or not at all.
-- KEYS: lease, head, tape, then: staged payloads, replaced payloads, the learners' streams that headers go from, and
--   all keys that go (delta payloads, retired payloads, the replaced momentum).
-- ARGV: nonce, expected version ('' for no head), expected digest, payload, rest, momentum and updates that the head names
--   ('' for none), ttl of replaced payloads in ms, merged deltas, merged tokens, tape record, number of staged payloads, chunks of
--   each, number of replaced ones, number of streams, number of headers, stream (from 0), entry ..., then field,
--   value ... of the head.
local lease, head, tape = KEYS[1], KEYS[2], KEYS[3]
local count = tonumber(ARGV[12])
local replaced, streams, headers = tonumber(ARGV[13 + count]), tonumber(ARGV[14 + count]), tonumber(ARGV[15 + count])
local entries = 16 + count
local fields = entries + 2 * headers
local from_replaced = 4 + count
local from_streams = from_replaced + replaced
local from_gone = from_streams + streams

local wrong = mistyped(lease, 'string', head, 'hash', tape, 'stream')
for i = 4, from_replaced - 1 do wrong = wrong or mistyped(KEYS[i], 'stream') end
for i = from_streams, from_gone - 1 do wrong = wrong or mistyped(KEYS[i], 'stream') end
if wrong then return wrong end
if redis.call('GET', lease) ~= ARGV[1] then return {'LEASE', lease} end
wrong = head_names_otherwise(head, 2)
if ARGV[2] == '' and redis.call('EXISTS', head) == 1 then wrong = wrong or {'HEAD', head} end
wrong = wrong or bad_total(head, 'merged_deltas', ARGV[9]) or bad_total(head, 'merged_tokens', ARGV[10])
  or bad_total(head, 'rejected_tokens', '0') or incomplete(4, count, 13)
if wrong then return wrong end

for i = 4, from_replaced - 1 do redis.call('PERSIST', KEYS[i]) end
for i = fields, #ARGV, 2 do redis.call('HSET', head, ARGV[i], ARGV[i + 1]) end
redis.call('HINCRBY', head, 'merged_deltas', ARGV[9])
redis.call('HINCRBY', head, 'merged_tokens', ARGV[10])
redis.call('HINCRBY', head, 'rejected_tokens', 0)
redis.call('XADD', tape, '*', 'r', ARGV[11])
for i = from_replaced, from_streams - 1 do redis.call('PEXPIRE', KEYS[i], ARGV[8]) end
for i = entries, fields - 1, 2 do redis.call('XDEL', KEYS[from_streams + ARGV[i]], ARGV[i + 1]) end
for i = from_gone, #KEYS do redis.call('UNLINK', KEYS[i]) end
return {'OK'}
