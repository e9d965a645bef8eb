"""The Lua scripts of the Redis store's queue: claim, acknowledge, release (see ``scripts.py``)."""

from __future__ import annotations

from tokenplane.staging.redis_backend.scripts import script

_CLAIMS = """
local function introduce(partition, consumer)
  go_on_when_full()
  call('SADD', ns .. ':P', partition)
  call('SADD', ns .. ':c:' .. partition, consumer)
  return call('GET', place('w', partition, consumer)) or '0'
end
local function is_leased(leases, seq, now)
  local expiry = call('ZSCORE', leases, seq)
  return expiry and tonumber(expiry) > now
end
local function deliver(partition, consumer, chosen, now, lease)
  -- chosen: key, row number, ...; gives expiry, then key, deliveries, row, ...
  local expiry = exact(now + lease)
  local reply = {expiry}
  for at = 1, #chosen, 2 do
    local key, seq = chosen[at], chosen[at + 1]
    call('ZADD', place('e', partition, consumer), expiry, seq)
    reply[#reply + 1] = key
    reply[#reply + 1] = call('HINCRBY', place('d', partition, consumer), seq, 1)
    reply[#reply + 1] = call('GET', place('m', partition, key))
  end
  return reply
end
"""

CLAIM = script(
    _CLAIMS
    + """
-- ARGV: now, partition, consumer, most rows, lease seconds
local now, partition, consumer, most = clock(), ARGV[2], ARGV[3], tonumber(ARGV[4])
local after, chosen = introduce(partition, consumer), {}
local acked, leases = place('a', partition, consumer), place('e', partition, consumer)
while #chosen < 2 * most do
  local page = call('ZRANGEBYSCORE', ns .. ':o:' .. partition, '(' .. after, '+inf', 'WITHSCORES',
                    'LIMIT', 0, math.max(most, 64))
  if #page == 0 then break end
  for at = 1, #page, 2 do
    local seq = page[at + 1]
    if #chosen < 2 * most and call('SISMEMBER', acked, seq) == 0
       and not is_leased(leases, seq, now) then
      chosen[#chosen + 1] = page[at]
      chosen[#chosen + 1] = seq
    end
  end
  after = page[#page]
end
return deliver(partition, consumer, chosen, now, tonumber(ARGV[5]))
"""
)

PENDING = script(
    _CLAIMS
    + """
-- ARGV: now, partition, consumer; gives the time, then key, row number, 1 under a live lease,
--       1 if it was delivered before, and the head that has its time, ...
local now, partition, consumer = clock(), ARGV[2], ARGV[3]
local reply = {exact(now)}
local after = introduce(partition, consumer)
local acked, leases = place('a', partition, consumer), place('e', partition, consumer)
local page = call('ZRANGEBYSCORE', ns .. ':o:' .. partition, '(' .. after, '+inf', 'WITHSCORES')
for at = 1, #page, 2 do
  local seq = page[at + 1]
  if call('SISMEMBER', acked, seq) == 0 then
    reply[#reply + 1] = page[at]
    reply[#reply + 1] = seq
    reply[#reply + 1] = is_leased(leases, seq, now) and 1 or 0
    reply[#reply + 1] = call('HEXISTS', place('d', partition, consumer), seq)
    reply[#reply + 1] = call('GETRANGE', place('m', partition, page[at]), 48, 55)
  end
end
return reply
"""
)

CLAIM_GROUPS = script(
    _CLAIMS
    + """
-- ARGV: now, partition, consumer, lease seconds, then per group: its size, key, row number, ...
-- Takes the groups of which nothing was taken, acknowledged or removed since they were chosen.
local now, partition, consumer, taken, chosen = clock(), ARGV[2], ARGV[3], {}, {}
local mark = tonumber(introduce(partition, consumer))
local acked, leases = place('a', partition, consumer), place('e', partition, consumer)
local at = 5
while at <= #ARGV do
  local last, free = at + 2 * tonumber(ARGV[at]), true
  for i = at + 1, last, 2 do
    local seq = ARGV[i + 1]
    free = free and call('ZSCORE', ns .. ':o:' .. partition, ARGV[i]) == seq
           and tonumber(seq) > mark and call('SISMEMBER', acked, seq) == 0
           and not is_leased(leases, seq, now)
  end
  if free then
    for i = at + 1, last, 2 do taken[#taken + 1] = {ARGV[i], ARGV[i + 1]} end
  end
  at = last + 1
end
table.sort(taken, function(a, b) return tonumber(a[2]) < tonumber(b[2]) end)
for _, pair in ipairs(taken) do
  chosen[#chosen + 1] = pair[1]
  chosen[#chosen + 1] = pair[2]
end
return deliver(partition, consumer, chosen, now, tonumber(ARGV[4]))
"""
)

ACK = script(
    _CLAIMS
    + """
-- ARGV: now, partition, consumer, keys
local partition, consumer, fresh = ARGV[2], ARGV[3], 0
local order, acked = ns .. ':o:' .. partition, place('a', partition, consumer)
local mark = tonumber(introduce(partition, consumer))
for at = 4, #ARGV do
  local seq = number_of(partition, ARGV[at])
  if seq and seq > mark and call('SADD', acked, seq) == 1 then
    fresh = fresh + 1
    call('ZREM', place('e', partition, consumer), seq)
    call('HDEL', place('d', partition, consumer), seq)
  end
end
local moved = mark
while true do
  local page = call('ZRANGEBYSCORE', order, '(' .. moved, '+inf', 'WITHSCORES', 'LIMIT', 0, 64)
  local before = moved
  for at = 2, #page, 2 do
    if call('SREM', acked, page[at]) == 0 then break end
    moved = tonumber(page[at])
  end
  if moved == before then break end
end
if moved > mark then call('SET', place('w', partition, consumer), exact(moved)) end
return fresh
"""
)

RELEASE = script(
    _CLAIMS
    + """
-- ARGV: now, partition, consumer, keys
local now, partition, consumer, ended = clock(), ARGV[2], ARGV[3], 0
introduce(partition, consumer)
local leases = place('e', partition, consumer)
for at = 4, #ARGV do
  local seq = number_of(partition, ARGV[at])
  if seq and is_leased(leases, seq, now) then
    call('ZADD', leases, exact(now), seq)
    ended = ended + 1
  end
end
return ended
"""
)
