-- Names under which nothing is pending go from a group's senders, where this user may: `offer` adds one again.
-- KEYS: senders, then of each name its streams, as many of each. ARGV: names.
-- Answers those names, and how many of them went.
local senders, each = KEYS[1], (#KEYS - 1) / #ARGV
local wrong = mistyped(senders, 'hash')
if wrong then return wrong end
local idle, gone = {}, 0
for i, name in ipairs(ARGV) do
  local pending = false
  for j = 2 + (i - 1) * each, 1 + i * each do
    -- What is no stream is not empty: the owner's read tells it.
    local kind = redis.call('TYPE', KEYS[j]).ok
    pending = pending or (kind ~= 'none' and (kind ~= 'stream' or redis.call('XLEN', KEYS[j]) > 0))
  end
  if not pending then
    idle[#idle + 1] = name
    local removed = redis.pcall('HDEL', senders, name)
    if type(removed) == 'number' then gone = gone + removed end
  end
end
return {'OK', idle, gone}
