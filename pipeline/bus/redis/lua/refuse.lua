-- Refuse deltas: headers and payloads go, records go on the tape. Done once, it does nothing more.
-- KEYS: lease, head, tape, then those that the fields below name by their places.
-- ARGV: a map of
--   nonce            of the lease
--   was              what the head has now: version, digest
--   lost_tokens      added to the head's rejected tokens
--   counts           {field, more}: what else is added to the head's totals
--   headers          {key, entries} of each learner's stream that headers go from; an entry is {at, mark}
--   gone             delta payloads that go
--   records          for the tape
local lease, head, tape = KEYS[1], KEYS[2], KEYS[3]
local a = fields(tape)

local refused = mistyped(lease, 'string', head, 'hash', tape, 'stream') or no_streams(a.headers)
if refused then return refused end
if redis.call('GET', lease) ~= a.nonce then return {'LEASE', lease} end
refused = head_moved(head, a.was) or bad_total(head, 'rejected_tokens', '0')
for _, one in ipairs(a.counts) do refused = refused or bad_total(head, one.field, one.more) end
if refused then return refused end
-- A refusal is never refused for what a peer says that it lost.
local lost_tokens = bad_total(head, 'rejected_tokens', a.lost_tokens) and '0' or a.lost_tokens
local pending = pending_of(a.headers)
if #pending == 0 and #a.headers > 0 then return {'OK'} end

redis.call('PERSIST', head)
delete_headers(pending)
for _, key in ipairs(a.gone) do redis.call('UNLINK', KEYS[key]) end
redis.call('HINCRBY', head, 'rejected_tokens', lost_tokens)
for _, one in ipairs(a.counts) do redis.call('HINCRBY', head, one.field, one.more) end
for _, record in ipairs(a.records) do redis.call('XADD', tape, '*', 'r', record) end
return {'OK'}
