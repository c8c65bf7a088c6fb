-- Move a fragment's head: exactly once, or not at all.
-- KEYS: lease, head, tape, payload, then: momentum (if any), replaced payload (if any), the learners' streams that
--   headers go from, and all keys that go (delta payloads, retired payloads, the replaced momentum).
-- ARGV: nonce, expected version ('' for no head), expected digest, payload chunks, momentum chunks ('' for none),
--   replaced payload, replaced momentum ('' for none), its ttl in ms, merged deltas, merged tokens, tape record,
--   number of streams, number of headers, stream (from 0), entry ..., then field, value ... of the head.
local lease, head, tape, payload = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local momentum, replaced
local at = 5
if ARGV[5] ~= '' then momentum, at = KEYS[at], at + 1 end
if ARGV[6] ~= '' then replaced, at = KEYS[at], at + 1 end

local wrong = mistyped(lease, 'string', head, 'hash', tape, 'stream', payload, 'stream')
  or (momentum and mistyped(momentum, 'stream'))
local streams, fields = tonumber(ARGV[12]), 14 + 2 * tonumber(ARGV[13])
for i = at, at + streams - 1 do wrong = wrong or mistyped(KEYS[i], 'stream') end
if wrong then return wrong end
if redis.call('GET', lease) ~= ARGV[1] then return {'LEASE', lease} end
local now = redis.call('HMGET', head, 'version', 'digest', 'payload', 'momentum')
if (now[1] or '') ~= ARGV[2] or (now[2] or '') ~= ARGV[3]
  or (now[3] or '') ~= ARGV[6] or (now[4] or '') ~= ARGV[7]
  or (ARGV[2] == '' and redis.call('EXISTS', head) == 1) then
  return {'HEAD', head, now[1]}
end
wrong = bad_total(head, 'merged_deltas', ARGV[9]) or bad_total(head, 'merged_tokens', ARGV[10])
  or bad_total(head, 'rejected_tokens', '0')
if wrong then return wrong end
local have = redis.call('XLEN', payload)
if have ~= tonumber(ARGV[4]) then return {'PAYLOAD', payload, have} end
if momentum then
  have = redis.call('XLEN', momentum)
  if have ~= tonumber(ARGV[5]) then return {'PAYLOAD', momentum, have} end
end

redis.call('PERSIST', payload)
if momentum then redis.call('PERSIST', momentum) end
for i = fields, #ARGV, 2 do redis.call('HSET', head, ARGV[i], ARGV[i + 1]) end
redis.call('HINCRBY', head, 'merged_deltas', ARGV[9])
redis.call('HINCRBY', head, 'merged_tokens', ARGV[10])
redis.call('HINCRBY', head, 'rejected_tokens', 0)
redis.call('XADD', tape, '*', 'r', ARGV[11])
if replaced then redis.call('PEXPIRE', replaced, ARGV[8]) end
for i = 14, fields - 1, 2 do redis.call('XDEL', KEYS[at + ARGV[i]], ARGV[i + 1]) end
for i = at + streams, #KEYS do redis.call('UNLINK', KEYS[i]) end
return {'OK'}
