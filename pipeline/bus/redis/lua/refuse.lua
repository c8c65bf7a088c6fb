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
--   cut              {key, keep, field}: of a learner's stream only so many entries stay, the last. The number of those
--                    that go is added to the field of the head, in which one of them is counted already. It may be missing
local lease, head, tape = KEYS[1], KEYS[2], KEYS[3]
local refused = mistyped(lease, 'string', head, 'hash', tape, 'stream')
if refused then return refused end
local a = fields(tape)

refused = no_streams(a.headers) or no_streams({a.cut})
if refused then return refused end
if redis.call('GET', lease) ~= a.nonce then return {'LEASE', lease} end
refused = head_moved(head, a.was) or bad_total(head, 'rejected_tokens', '0')
for _, one in ipairs(a.counts) do refused = refused or bad_total(head, one.field, one.more) end
local surplus = a.cut and redis.call('XLEN', KEYS[a.cut.key]) - a.cut.keep or 0
refused = refused or a.cut and bad_total(head, a.cut.field, surplus)
if refused then return refused end
if a.cut and surplus <= 0 then return {'OK'} end
-- A refusal is never refused for what a peer says that it lost.
local lost_tokens = bad_total(head, 'rejected_tokens', a.lost_tokens) and '0' or a.lost_tokens
local pending = pending_of(a.headers)
if #pending == 0 and #a.headers > 0 then return {'OK'} end

redis.call('PERSIST', head)
delete_headers(pending)
for _, key in ipairs(a.gone) do redis.call('UNLINK', KEYS[key]) end
redis.call('HINCRBY', head, 'rejected_tokens', lost_tokens)
for _, one in ipairs(a.counts) do redis.call('HINCRBY', head, one.field, one.more) end
if a.cut then
  redis.call('XTRIM', KEYS[a.cut.key], 'MAXLEN', a.cut.keep)
  redis.call('HINCRBY', head, a.cut.field, surplus - 1)
end
for _, record in ipairs(a.records) do redis.call('XADD', tape, '*', 'r', record) end
return {'OK'}
