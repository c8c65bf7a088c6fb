-- Move a fragment's head: exactly once, or not at all. All checks come before the first write, since Redis does not roll
-- back a script that fails. The functions that are not defined here are in _prelude.lua.
-- KEYS: lease, head, tape, then those that the fields below name by their index in KEYS.
-- ARGV: a map of
--   nonce            of the lease
--   was              what the head has now: version ('' for no head), digest, payload, rest, momentum
--   set              field, value ... of the head
--   merged_deltas, merged_tokens   added to its totals
--   record           for the tape
--   staged           {key, chunks} of each payload that stays from now on
--   replaced, replaced_ttl_ms      payloads that the head names no more, and how long they live on
--   headers          {key, entries} of each learner's stream that headers go from; an entry is {at, mark}
--   gone             keys that go: delta payloads, retired payloads, the replaced momentum
local lease, head, tape = KEYS[1], KEYS[2], KEYS[3]
local refused = mistyped(lease, 'string', head, 'hash', tape, 'stream')
if refused then return refused end
local a = fields(tape)

refused = no_streams(a.staged) or no_streams(a.headers)
if refused then return refused end
if redis.call('GET', lease) ~= a.nonce then return {'LEASE', lease} end
refused = head_moved(head, a.was)
if a.was.version == '' and redis.call('HGET', head, 'version') then refused = refused or {'HEAD', head} end
refused = refused or bad_total(head, 'merged_deltas', a.merged_deltas) or bad_total(head, 'merged_tokens', '0')
  or bad_total(head, 'rejected_tokens', '0') or incomplete(a.staged)
if refused then return refused end
-- A commit is never refused for what a peer says that it trained.
local merged_tokens = bad_total(head, 'merged_tokens', a.merged_tokens) and '0' or a.merged_tokens
local pending = pending_of(a.headers)

for _, one in ipairs(a.staged) do redis.call('PERSIST', KEYS[one.key]) end
redis.call('HSET', head, unpack(a.set))
redis.call('HINCRBY', head, 'merged_deltas', a.merged_deltas)
redis.call('HINCRBY', head, 'merged_tokens', merged_tokens)
redis.call('HINCRBY', head, 'rejected_tokens', 0)
redis.call('XADD', tape, '*', 'r', a.record)
for _, key in ipairs(a.replaced) do redis.call('PEXPIRE', KEYS[key], a.replaced_ttl_ms) end
delete_headers(pending)
for _, key in ipairs(a.gone) do redis.call('UNLINK', KEYS[key]) end
return {'OK'}
