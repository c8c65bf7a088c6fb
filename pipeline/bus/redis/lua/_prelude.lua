-- Stands before every script. Redis rolls nothing back: each script first checks all that could stop it,
-- types included, and then writes. A script answers an array that begins with 'OK', or with what refused it.
--
-- Where memory is short, Redis refuses a script's first write if that needs memory, and lets a script that
-- has written go on. Scripts that must run even then begin with a write that needs none (PERSIST, UNLINK).
--
-- A script with many arguments takes one msgpack map instead. A key stands in it as its place in KEYS.
--
-- Any user may call any script, with any arguments: what each may do is checked command by command.

local function mistyped(...)
  local args = {...}
  for i = 1, #args, 2 do
    local kind = redis.call('TYPE', args[i]).ok
    if kind ~= 'none' and kind ~= args[i + 1] then return {'TYPE', args[i], kind} end
  end
end

-- What would live for longer than any of ours, or for ever, lives from now for so long, or for `ttl_ms`.
local function bound(key, max_ms, ttl_ms)
  local left = redis.call('PTTL', key)
  if left == -1 or left > tonumber(max_ms) then redis.call('PEXPIRE', key, ttl_ms or max_ms) end
end

-- What any learner may have written: no more of it than shows that it is too large.
local function cut(value, max_bytes)
  return value and value:sub(1, max_bytes + 1)
end

-- A number that any learner may have written, below 10^18; 0 where there is none.
local function number(value)
  return value and #value < 19 and value:match('^%d+$') and tonumber(value) or 0
end

-- What a script looks at and copies of such values, but for the last of them.
local PART_BYTES = 2 ^ 22

-- The map that an owner's write takes. Some megabytes of empty arrays would take all of the server's memory, so it is
-- unpacked only for who may trim a tape; nothing is trimmed.
local function fields(key)
  redis.call('XTRIM', key, 'MINID', '0')
  return cmsgpack.unpack(ARGV[1])
end

-- Nil if HINCRBY can add to a total and it stays in bounds.
local function bad_total(key, field, more)
  local have = redis.call('HGET', key, field) or '0'
  if not have:match('^%d+$') or tonumber(have) + tonumber(more) >= 2 ^ 62 then return {'TOTAL', key, field} end
end

-- Nil if a fragment's head has what `was` says, field by field; '' stands for none.
local function head_moved(key, was)
  local fields = {'version', 'digest', 'payload', 'rest', 'momentum'}
  local now = redis.call('HMGET', key, unpack(fields))
  for i, field in ipairs(fields) do
    if was[field] and was[field] ~= (now[i] or '') then return {'HEAD', key, now[1]} end
  end
end

-- Nil if all staged payloads, as {key, chunks}, have their chunks.
local function incomplete(staged)
  for _, one in ipairs(staged) do
    local have = redis.call('XLEN', KEYS[one.key])
    if have ~= one.chunks then return {'PAYLOAD', KEYS[one.key], have} end
  end
end

-- Nil if the keys of all that is listed, as {key, ...}, are streams or not there.
local function no_streams(listed)
  for _, one in ipairs(listed) do
    local wrong = mistyped(KEYS[one.key], 'stream')
    if wrong then return wrong end
  end
end

-- Those of some headers, listed as {key, entries} by learner's stream, that are there, as {key, at}. An entry is
-- {at, mark}: after a loss another header may have its id, of which the mark tells. '' is the mark of any.
local function pending_of(headers)
  local found = {}
  for _, one in ipairs(headers) do
    for _, entry in ipairs(one.entries) do
      local there = redis.call('XRANGE', KEYS[one.key], entry.at, entry.at)[1]
      if there and (entry.mark == '' or redis.sha1hex(there[2][2]):sub(1, 8) == entry.mark) then
        table.insert(found, {key = one.key, at = entry.at})
      end
    end
  end
  return found
end

-- Delete headers that were found so.
local function delete_headers(found)
  for _, one in ipairs(found) do redis.call('XDEL', KEYS[one.key], one.at) end
end

-- Whether the work queue has its consumer group; any learner may have made others.
local function has_group(key)
  for _, group in ipairs(redis.call('EXISTS', key) == 1 and redis.call('XINFO', 'GROUPS', key) or {}) do
    if group[2] == 'learners' then return true end
  end
  return false
end

-- Whether a consumer is the present holder of an entry of the work queue.
local function holds(key, consumer, entry)
  if not has_group(key) then return false end
  local held = redis.call('XPENDING', key, 'learners', entry, entry, 1)[1]
  return held ~= nil and held[2] == consumer
end

-- Holder of what was given back: no consumer's name, since those have a dot before the incarnation.
local RELEASED = 'released'

