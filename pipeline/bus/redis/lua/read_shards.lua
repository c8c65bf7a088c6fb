-- The work queue as it is at one moment: epochs, entries, positions.
-- KEYS: shards, positions, epochs. ARGV: entries and positions at most; any learner may put there what it likes.
local shards, positions, epochs = unpack(KEYS)
local wrong = mistyped(shards, 'stream', positions, 'hash', epochs, 'string')
if wrong then return wrong end
local most = tonumber(ARGV[1])
if redis.call('XLEN', shards) > most then return {'SIZE', shards, 'queue of too many entries'} end
-- A few at a time: each may be as large as Redis takes.
local entries, last = {}, '0'
repeat
  local found = redis.call('XREAD', 'COUNT', 16, 'STREAMS', shards, last)
  for _, entry in ipairs(found and found[1][2] or {}) do
    last = entry[1]
    table.insert(entries, {last, {'', cut(entry[2][2], 1024)}})
  end
until not found
local read, cursor = {}, '0'
repeat
  local part = redis.call('HSCAN', positions, cursor, 'COUNT', 1)
  cursor = part[1]
  for _, value in ipairs(part[2]) do table.insert(read, cut(value, 64)) end
  if #read > 2 * most then return {'SIZE', positions, 'hash of too many positions'} end
until cursor == '0'
return {'OK', cut(redis.call('GET', epochs), 64), entries, read}
