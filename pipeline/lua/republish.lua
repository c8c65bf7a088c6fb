-- Have a fragment's head name other payloads of the same version: exactly once, or not at all.
-- KEYS: lease, head, tape (not written), then: staged payloads, replaced payloads, the replaced momentum if there is one.
-- ARGV: nonce, expected version, expected digest, payload, rest, momentum and updates that the head names ('' for none),
--   ttl of replaced payloads in ms, number of staged payloads, chunks of each, number of replaced ones, then field,
--   value ... of the head.
local lease, head = KEYS[1], KEYS[2]
local count = tonumber(ARGV[9])
local from_replaced = 4 + count
local from_gone = from_replaced + tonumber(ARGV[10 + count])

local wrong = mistyped(lease, 'string', head, 'hash', KEYS[3], 'stream')
for i = 4, from_replaced - 1 do wrong = wrong or mistyped(KEYS[i], 'stream') end
if wrong then return wrong end
if redis.call('GET', lease) ~= ARGV[1] then return {'LEASE', lease} end
wrong = head_names_otherwise(head, 2) or incomplete(4, count, 10)
if wrong then return wrong end

for i = 4, from_replaced - 1 do redis.call('PERSIST', KEYS[i]) end
for i = 11 + count, #ARGV, 2 do redis.call('HSET', head, ARGV[i], ARGV[i + 1]) end
for i = from_replaced, from_gone - 1 do redis.call('PEXPIRE', KEYS[i], ARGV[8]) end
for i = from_gone, #KEYS do redis.call('UNLINK', KEYS[i]) end
return {'OK'}
