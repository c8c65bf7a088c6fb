-- Entries of streams as XREAD gives them, of each value no more than shows that it is too large: who owns it can be
-- told so, and nobody else waits. Where they are many, only the first of each stream, and some more.
-- KEYS: streams. ARGV: entries of each at most, bytes of a value at most, then the cursors.
-- Answers {key, entries} of those that have some.
local limit, max_bytes = tonumber(ARGV[1]), tonumber(ARGV[2])
local entries, cursors, taken, bytes, more = {}, {}, 0, 0, true
for i = 1, #KEYS do entries[i], cursors[i] = {}, ARGV[i + 2] end
while more and taken < limit and bytes < PART_BYTES do
  more, taken = false, taken + 1
  for i, key in ipairs(KEYS) do
    -- One at a time: each may be as large as Redis takes.
    local found = cursors[i] and redis.call('XREAD', 'COUNT', 1, 'STREAMS', key, cursors[i])
    cursors[i] = nil
    if found then
      local id, fields = unpack(found[1][2][1])
      for _, part in ipairs(fields) do bytes = bytes + #part end
      table.insert(entries[i], {id, {'', cut(fields[2], max_bytes)}})
      more, cursors[i] = true, id
    end
  end
end
local answer = {'OK'}
for i, key in ipairs(KEYS) do
  if #entries[i] > 0 then table.insert(answer, {key, entries[i]}) end
end
return answer
