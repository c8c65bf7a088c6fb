-- Stands before every script. Redis rolls nothing back: each script first checks all that could stop it,
-- types included, and then writes. A script answers an array that begins with 'OK', or with what refused it.
--
-- Where memory is short, Redis refuses a script's first write if that needs memory, and lets a script that
-- has written go on. Scripts that must run even then begin with a write that needs none (PERSIST, UNLINK).

local function mistyped(...)
  local args = {...}
  for i = 1, #args, 2 do
    local kind = redis.call('TYPE', args[i]).ok
    if kind ~= 'none' and kind ~= args[i + 1] then return {'TYPE', args[i], kind} end
  end
end

-- Nil if HINCRBY can add to a total and it stays in bounds.
local function bad_total(key, field, more)
  local have = redis.call('HGET', key, field) or '0'
  if not have:match('^%d+$') or tonumber(have) + tonumber(more) >= 2 ^ 62 then return {'TOTAL', key, field} end
end

-- Nil if a fragment's head is at this version and digest.
local function head_moved(key, version, digest)
  local now = redis.call('HMGET', key, 'version', 'digest')
  if now[1] ~= version or now[2] ~= digest then return {'HEAD', key, now[1]} end
end

-- Nil if a fragment's head names what ARGV says from `at` on: version ('' for no head), digest, payload, rest, momentum,
-- updates.
local function head_names_otherwise(key, at)
  local now = redis.call('HMGET', key, 'version', 'digest', 'payload', 'rest', 'momentum', 'updates')
  for i = 1, 6 do
    if (now[i] or '') ~= ARGV[at + i - 1] then return {'HEAD', key, now[1]} end
  end
end

-- Nil if `count` payloads from KEYS[first] on have as many chunks as ARGV says from `at` on.
local function incomplete(first, count, at)
  for i = 0, count - 1 do
    local have = redis.call('XLEN', KEYS[first + i])
    if have ~= tonumber(ARGV[at + i]) then return {'PAYLOAD', KEYS[first + i], have} end
  end
end

-- Whether the work queue has its consumer group.
local function has_group(key)
  return redis.call('EXISTS', key) == 1 and #redis.call('XINFO', 'GROUPS', key) > 0
end

-- Whether a consumer is the present holder of an entry of the work queue.
local function holds(key, consumer, entry)
  if not has_group(key) then return false end
  local held = redis.call('XPENDING', key, 'learners', entry, entry, 1)[1]
  return held ~= nil and held[2] == consumer
end

-- Holder of what was given back: no consumer's name, since those have a dot before the incarnation.
local RELEASED = 'released'

