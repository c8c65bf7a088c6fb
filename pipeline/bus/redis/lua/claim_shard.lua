-- Take a shard. First one that this consumer holds without knowing it (the answer to its claim was lost), then the
-- oldest whose holder is gone, then the next that nobody holds. Answers entry id, shard, position; or nothing.
-- A holder is gone when it gave its shards back, or has been silent for long enough.
-- KEYS: shards, positions, seen. ARGV: consumer, silence in ms, the entries that the consumer knows it holds.
local shards, positions, seen = unpack(KEYS)
local consumer, silent_ms = ARGV[1], tonumber(ARGV[2])
local wrong = mistyped(shards, 'stream', positions, 'hash', seen, 'hash')
if wrong then return wrong end
if not has_group(shards) then return {'OK'} end
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
local known = {}
for i = 3, #ARGV do known[ARGV[i]] = true end

local function gone(holder, idle_ms)
  if holder == RELEASED then return true end
  -- A consumer is `learner.incarnation`, its field in `seen` is `learner/incarnation`.
  local last_ms = redis.call('HGET', seen, (holder:gsub('%.([^.]*)$', '/%1')))
  if last_ms and last_ms:match('^%d+$') then return now_ms - tonumber(last_ms) >= silent_ms end
  return idle_ms >= silent_ms
end

local function before(a, b)
  local a_ms, a_seq = a:match('^(%d+)-(%d+)$')
  local b_ms, b_seq = b:match('^(%d+)-(%d+)$')
  if a_ms ~= b_ms then return tonumber(a_ms) < tonumber(b_ms) end
  return tonumber(a_seq) < tonumber(b_seq)
end

local mine, theirs
for _, holder in ipairs(redis.call('XPENDING', shards, 'learners')[4] or {}) do
  if holder[1] == consumer then
    -- One more than are known: if there is one that is not, it is found.
    for _, held in ipairs(redis.call('XPENDING', shards, 'learners', '-', '+', #ARGV - 1, consumer)) do
      mine = mine or (not known[held[1]] and held[1])
    end
  else
    local held = redis.call('XPENDING', shards, 'learners', '-', '+', 1, holder[1])[1]
    if gone(holder[1], held[3]) and (not theirs or before(held[1], theirs)) then theirs = held[1] end
  end
end

local entry
if mine or theirs then
  entry = redis.call('XCLAIM', shards, 'learners', consumer, 0, mine or theirs)[1]
  if not entry then redis.call('XACK', shards, 'learners', mine or theirs) end -- somebody deleted it
else
  local found = redis.call('XREADGROUP', 'GROUP', 'learners', consumer, 'COUNT', 1, 'STREAMS', shards, '>')
  entry = found and found[1][2][1]
end
if not entry then return {'OK'} end
return {'OK', entry[1], cut(entry[2][2], 1024), cut(redis.call('HGET', positions, entry[1]), 20)}
