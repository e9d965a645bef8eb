"""The Lua scripts that count and sweep the Redis store's rows (names as in ``scripts.py``)."""

from __future__ import annotations

from tokenplane.staging.redis_backend.scripts import script

STATS = script("""
-- ARGV: now, '1' for the whole store, partition, prefix
local now, whole, chosen = clock(), ARGV[2] == '1', {ARGV[3]}
if whole then chosen = call('SMEMBERS', ns .. ':P') end
local rows, bytes, blobs, blob_bytes = 0, 0, 0, 0
local sealed, readers = {}, {}
for _, partition in ipairs(chosen) do
  local order, meta = ns .. ':o:' .. partition, ns .. ':p:' .. partition
  if call('HEXISTS', meta, 'sealed') == 1 then sealed[#sealed + 1] = partition end
  for _, name in ipairs(call('SMEMBERS', ns .. ':c:' .. partition)) do
    local mark = call('GET', place('w', partition, name)) or '0'
    local pending = call('ZCOUNT', order, '(' .. mark, '+inf')
                    - call('SCARD', place('a', partition, name))
    local live = call('ZCOUNT', place('e', partition, name), '(' .. exact(now), '+inf')
    readers[#readers + 1] = {name, pending, live}
  end
end
if whole then
  local t = call('HMGET', total, 'blobs', 'blob_bytes')
  for _, partition in ipairs(chosen) do rows = rows + call('ZCARD', ns .. ':o:' .. partition) end
  bytes, blobs, blob_bytes = stored_bytes(), tonumber(t[1] or 0), tonumber(t[2] or 0)
else
  local partition, prefix, seen = ARGV[3], ARGV[4], {}
  if prefix == '' then
    rows = call('ZCARD', ns .. ':o:' .. partition)
    bytes = tonumber(call('HGET', ns .. ':p:' .. partition, 'bytes') or 0)
  else
    for _, key in ipairs(matching(partition, prefix)) do
      rows, bytes = rows + 1, bytes + message_size(partition, key)
    end
  end
  local owners = call('HGETALL', ns .. ':x:' .. partition)
  for at = 1, #owners, 2 do
    if string.sub(owners[at], 1, #prefix) == prefix then
      each_sha(owners[at + 1], function(sha)
        if not seen[sha] then
          seen[sha] = true
          blobs = blobs + 1
          blob_bytes = blob_bytes + call('STRLEN', ns .. ':b:' .. sha)
        end
      end)
    end
  end
end
return {tostring(rows), exact(bytes), tostring(blobs), exact(blob_bytes), sealed, readers}
""")

SWEEP = script("""
-- ARGV: now, partition, prefix, age, '1' to keep the backlog, '1' to remove, after, most rows;
--       most 0: every row with the prefix, and none goes unless all may
-- gives last row number ('' at the end), removed rows, bytes, kept leased, kept held,
--       kept backlog, blobs, blob bytes, hashes of the blobs of rows that would go
local now, partition, prefix, age = clock(), ARGV[2], ARGV[3], tonumber(ARGV[4])
local order, whole = ns .. ':o:' .. partition, ARGV[8] == '0'
local page, holds = {}, live_holds(partition)
if whole then
  for _, key in ipairs(matching(partition, prefix)) do
    page[#page + 1] = key
    page[#page + 1] = number_of(partition, key)
  end
else
  page = call('ZRANGEBYSCORE', order, '(' .. ARGV[7], '+inf', 'WITHSCORES',
              'LIMIT', 0, tonumber(ARGV[8]))
end
local readers = {}
for _, name in ipairs(call('SMEMBERS', ns .. ':c:' .. partition)) do
  readers[#readers + 1] = {place('e', partition, name), place('a', partition, name),
                           tonumber(call('GET', place('w', partition, name)) or 0)}
end
local rows, bytes, leased, held, backlog, blobs, blob_bytes = 0, 0, 0, 0, 0, 0, 0
local chosen, shas, young = {}, {}, false
for at = 1, #page, 2 do
  local key, seq = page[at], tonumber(page[at + 1])
  local head = call('GETRANGE', place('m', partition, key), 48, 55)
  local mine = string.sub(key, 1, #prefix) == prefix
  if mine and now - struct.unpack('<d', head) >= age then
    local live, waits = false, false
    for _, reader in ipairs(readers) do
      local expiry = call('ZSCORE', reader[1], seq)
      live = live or (expiry and tonumber(expiry) > now)
      waits = waits or (seq > reader[3] and call('SISMEMBER', reader[2], seq) == 0)
    end
    if live then
      leased = leased + 1
    elseif is_held(holds, key) then
      held = held + 1
    elseif waits and ARGV[5] == '1' then
      backlog = backlog + 1
    else
      chosen[#chosen + 1] = key
    end
  elseif mine then
    young = true
  end
end
if whole and (young or leased + held + backlog > 0) then chosen = {} end
for _, key in ipairs(chosen) do
  rows = rows + 1
  if ARGV[6] == '1' then
    local size, gone, gone_bytes = remove(partition, key)
    bytes, blobs, blob_bytes = bytes + size, blobs + gone, blob_bytes + gone_bytes
  else
    bytes = bytes + message_size(partition, key)
    shas[#shas + 1] = call('HGET', ns .. ':x:' .. partition, key) or ''
  end
end
local last = ''
if not whole and #page > 0 then last = page[#page] end
return {last, rows, exact(bytes), leased, held, backlog, blobs, exact(blob_bytes),
        table.concat(shas)}
""")
