-- A part of a hash that learners share, without what is larger than any of ours. That goes, where this user may.
-- KEYS: hash. ARGV: where to go on ('0': at its start), bytes of a name at most, bytes of a value at most.
-- Answers where the next part begins ('0': there is none), how many fields went, and names and values by turns.
local hash, cursor, max_name, max_value = KEYS[1], ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local wrong = mistyped(hash, 'hash')
if wrong then return wrong end
local found, gone, bytes, looks = {}, 0, 0, 0
repeat
  -- A few at a time: each may be as large as Redis takes.
  local part = redis.call('HSCAN', hash, cursor, 'COUNT', 1)
  cursor, looks = part[1], looks + 1
  for i = 1, #part[2], 2 do
    local name, value = part[2][i], part[2][i + 1]
    bytes = bytes + #name + #value
    if #name <= max_name and #value <= max_value then
      table.insert(found, name)
      table.insert(found, value)
    else
      local removed = redis.pcall('HDEL', hash, name)
      if type(removed) == 'number' then gone = gone + removed end
    end
  end
until cursor == '0' or looks == 1000 or bytes >= PART_BYTES
return {'OK', cursor, gone, found}
