-- Take what nobody holds, or prolong what is held under the same nonce.
-- Another's that would be held for longer than anybody's may be, or for ever, ends after this ttl.
-- KEYS: holders. ARGV: nonce, ttl in ms, ms that anybody's may last. Answers of each 1 if it is held now, else 0, or what
-- refused it: one that somebody has damaged holds up none of the others.
local nonce, ttl_ms, max_ms = ARGV[1], ARGV[2], ARGV[3]
local answers = {'OK'}
for _, key in ipairs(KEYS) do
  local wrong = mistyped(key, 'string')
  local holder = not wrong and redis.call('GET', key)
  if holder == nonce then
    redis.call('PEXPIRE', key, ttl_ms)
  elseif holder then
    bound(key, max_ms, ttl_ms)
  elseif not wrong then
    redis.call('UNLINK', key)
    redis.call('SET', key, nonce, 'PX', ttl_ms)
  end
  table.insert(answers, wrong or (not holder or holder == nonce) and 1 or 0)
end
return answers
