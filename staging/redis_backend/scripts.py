"""The Lua scripts of the Redis store: each one is one atomic step on the server.

Every script takes ``KEYS[1] = {namespace}:t`` and derives the other names from it. They all carry
the hash tag ``{namespace}``, so that in a cluster they lie in the slot of the declared key.

Names, with N for ``{namespace}``, P for a partition, K for a key, C for a consumer::

    N:t                 hash: seq (last row number), blobs, blob_bytes of the whole store
    N:P                 set: partitions that have rows or consumers
    N:p:P               hash: label, sealed, bytes
    N:o:P               zset: key by row number (write order)
    N:l:P               zset: key by nothing (prefix search)
    N:x:P               hash: key to the concatenated hashes of its blobs
    N:m:<len P>:P:K     string: 80-byte row header, head of the token part (see row_split) if there
                        is one, message
    N:b:<sha>, N:n:<sha>    strings: content of a blob, number of rows that refer to it
    N:u:<nonce><sha>    string: big blob on its way into a row; it expires if its writer dies
    N:c:P               set: consumers
    N:w:<len P>:P:C     string: watermark; all rows up to it are acknowledged
    N:a:<len P>:P:C     set: acknowledged row numbers above the watermark
    N:e:<len P>:P:C     zset: row number by expiry of its lease
    N:d:<len P>:P:C     hash: row number to its number of deliveries
    N:h:P               zset: hold id (32 digits) and prefix, by expiry
    N:s                 zset: running scans by the time at which they are given up
    N:g                 set: numbers of removed rows that a running scan may still want
    N:g:m:<n>           string: such a row

Row header: binding (32 bytes), writer's nonce (16), Unix seconds (float64); bytes of the head,
start of the token slice in the string, its bytes, bytes of the message (uint32 each); zero (8).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

ROW_HEADER_BYTES: Final = 80


@dataclass(frozen=True, slots=True)
class Script:
    """A script and the name by which the server knows it."""

    text: str
    sha1: str


def script(body: str, *, bare: bool = False) -> Script:
    """A script after the definitions below, or without them (each call runs them anew)."""
    text = body if bare else _NAMES + _REST + body
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


_NAMES = """
local call = redis.call
local total = KEYS[1]
local ns = string.sub(total, 1, -3)
local function place(kind, partition, name)
  return ns .. ':' .. kind .. ':' .. #partition .. ':' .. partition .. ':' .. name
end
local function stored_bytes()
  local sum = 0
  for _, partition in ipairs(call('SMEMBERS', ns .. ':P')) do
    sum = sum + tonumber(call('HGET', ns .. ':p:' .. partition, 'bytes') or 0)
  end
  return sum
end
"""
# ARGV[1] is the time by the caller's clock; empty means the server's own, one clock for all hosts.
_REST = """
local function clock()
  if ARGV[1] ~= '' then return tonumber(ARGV[1]) end
  local t = call('TIME')
  return tonumber(t[1]) + tonumber(t[2]) / 1000000
end
local function exact(number) return string.format('%.17g', number) end
local function each_sha(shas, visit)
  for at = 1, #shas, 32 do visit(string.sub(shas, at, at + 31)) end
end
local function number_of(partition, key)
  local seq = call('ZSCORE', ns .. ':o:' .. partition, key)
  return seq and tonumber(seq)
end
local function matching(partition, prefix)
  if prefix == '' then return call('ZRANGE', ns .. ':o:' .. partition, 0, -1) end
  local found = call('ZRANGEBYLEX', ns .. ':l:' .. partition, '[' .. prefix,
                     '(' .. prefix .. '\\255')
  local seqs, rank = {}, {}
  for at = 1, #found, 4000 do
    local part = call('ZMSCORE', ns .. ':o:' .. partition,
                      unpack(found, at, math.min(at + 3999, #found)))
    for i = 1, #part do rank[found[at + i - 1]] = tonumber(part[i]) end
  end
  table.sort(found, function(a, b) return rank[a] < rank[b] end)
  return found
end
local function message_size(partition, key)
  local field = call('GETRANGE', place('m', partition, key), 68, 71)
  if #field < 4 then return 0 end
  return (struct.unpack('<I', field))
end
local function go_on_when_full()
  -- A server without memory refuses a script whose first write needs some; this one needs none.
  -- For what reads the store or drains it, so that somebody can make room.
  call('DEL', ns .. ':none')
end
-- Counters go down by 0 - x: minus x would be a minus zero, which some servers refuse.
local function forget_removed()
  -- True if no scan runs: what was kept for scans goes, some of it per call.
  call('ZREMRANGEBYSCORE', ns .. ':s', '-inf', exact(clock()))
  if call('EXISTS', ns .. ':s') == 1 then return false end
  for _, seq in ipairs(call('SPOP', ns .. ':g', 1000)) do
    call('DEL', ns .. ':g:m:' .. seq)
  end
  return true
end
local function live_holds(partition)
  local name, held = ns .. ':h:' .. partition, {}
  if call('EXISTS', name) == 1 then
    for _, hold in ipairs(call('ZRANGEBYSCORE', name, '(' .. exact(clock()), '+inf')) do
      held[#held + 1] = string.sub(hold, 33)
    end
  end
  return held
end
local function is_held(holds, key)
  for _, prefix in ipairs(holds) do
    if string.sub(key, 1, #prefix) == prefix then return true end
  end
  return false
end
local function remove(partition, key)
  local seq = number_of(partition, key)
  if not seq then return nil end
  local meta, blobs, blob_bytes = ns .. ':p:' .. partition, 0, 0
  local size = message_size(partition, key)
  call('ZREM', ns .. ':o:' .. partition, key)
  call('ZREM', ns .. ':l:' .. partition, key)
  call('HINCRBY', meta, 'bytes', 0 - size)
  for _, name in ipairs(call('SMEMBERS', ns .. ':c:' .. partition)) do
    call('SREM', place('a', partition, name), seq)
    call('ZREM', place('e', partition, name), seq)
    call('HDEL', place('d', partition, name), seq)
  end
  local shas = call('HGET', ns .. ':x:' .. partition, key)
  if shas then
    call('HDEL', ns .. ':x:' .. partition, key)
    each_sha(shas, function(sha)
      if call('DECR', ns .. ':n:' .. sha) <= 0 then
        blobs = blobs + 1
        blob_bytes = blob_bytes + call('STRLEN', ns .. ':b:' .. sha)
        call('DEL', ns .. ':b:' .. sha, ns .. ':n:' .. sha)
      end
    end)
  end
  local row = place('m', partition, key)
  if forget_removed() then
    call('DEL', row)
  else
    call('SADD', ns .. ':g', seq)
    call('RENAME', row, ns .. ':g:m:' .. seq)
  end
  if blobs > 0 then
    call('HINCRBY', total, 'blobs', 0 - blobs)
    call('HINCRBY', total, 'blob_bytes', 0 - blob_bytes)
  end
  if call('EXISTS', ns .. ':o:' .. partition) == 0 then
    call('DEL', meta)
    if call('EXISTS', ns .. ':c:' .. partition) == 0 then
      call('SREM', ns .. ':P', partition)
    end
  end
  return size, blobs, blob_bytes
end
"""

PUT = script(
    """
-- KEYS: the total, the row, N:o:P, N:l:P, N:p:P
-- ARGV: partition, key, label, row, bytes, budget, then sha, bytes, content of each blob ('' where
--       it was uploaded, or is thought to be there). Gives 1, or what happened and some context.
-- As a rule this is all, and much cheaper than all that could be.
if ARGV[6] == '' and #ARGV == 6 then
  local held = redis.call('HMGET', KEYS[5], 'label', 'sealed')
  local wrote = held[1] == ARGV[3] and not held[2]
                and redis.pcall('SET', KEYS[2], ARGV[4], 'NX')
  -- Refused for want of memory: below, a row that is there already is still found.
  if wrote and not wrote.err then
    redis.call('ZADD', KEYS[3], redis.call('HINCRBY', KEYS[1], 'seq', 1), ARGV[2])
    redis.call('ZADD', KEYS[4], 0, ARGV[2])
    redis.call('HINCRBY', KEYS[5], 'bytes', ARGV[5])
    return 1
  end
end
"""
    + _NAMES
    + """
local partition, key, label, content = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local size, budget = tonumber(ARGV[5]), tonumber(ARGV[6])
local function upload(sha) return ns .. ':u:' .. string.sub(content, 33, 48) .. sha end
local row, order, meta = KEYS[2], KEYS[3], KEYS[5]
local there = call('GETRANGE', row, 0, 47)
if there ~= '' then
  if string.sub(there, 1, 32) ~= string.sub(content, 1, 32) then return {'conflict'} end
  return {there == string.sub(content, 1, 48) and 'new' or 'same'}
end
local held = call('HMGET', meta, 'label', 'sealed')
if held[2] then return {'sealed'} end
if held[1] and held[1] ~= label then return {'label', held[1]} end
local need, wanted, fresh = size, {'blobs'}, {}
for at = 7, #ARGV, 3 do
  local sha, bytes = ARGV[at], tonumber(ARGV[at + 1])
  if call('EXISTS', ns .. ':n:' .. sha) == 0 then
    need = need + bytes
    fresh[#fresh + 1] = at
    if ARGV[at + 2] == '' and bytes > 0 and call('EXISTS', upload(sha)) == 0 then
      wanted[#wanted + 1] = sha
    end
  end
end
if budget then
  local sum = stored_bytes() + tonumber(call('HGET', total, 'blob_bytes') or 0)
  if sum + need > budget then return {'full', tostring(need), tostring(sum)} end
end
if #wanted > 1 then return wanted end
local shas = {}
for at = 7, #ARGV, 3 do
  call('INCR', ns .. ':n:' .. ARGV[at])
  shas[#shas + 1] = ARGV[at]
end
for _, at in ipairs(fresh) do
  local blob = ns .. ':b:' .. ARGV[at]
  if ARGV[at + 2] == '' and ARGV[at + 1] ~= '0' then
    call('RENAME', upload(ARGV[at]), blob)
    call('PERSIST', blob)
  else
    call('SET', blob, ARGV[at + 2])
  end
  call('HINCRBY', total, 'blobs', 1)
  call('HINCRBY', total, 'blob_bytes', tonumber(ARGV[at + 1]))
end
if #shas > 0 then call('HSET', ns .. ':x:' .. partition, key, table.concat(shas)) end
local seq = call('HINCRBY', total, 'seq', 1)
call('SET', row, content)
call('ZADD', order, seq, key)
call('ZADD', KEYS[4], 0, key)
if not held[1] then
  call('HSET', meta, 'label', label)
  call('SADD', ns .. ':P', partition)
end
call('HINCRBY', meta, 'bytes', size)
return {'new'}
""",
    bare=True,
)

TOKENS = script(
    """
-- KEYS: rows; gives head and token slice of each: nil without the row, '' without a head
local reply, count = {}, 0
for at = 1, #KEYS do
  local first = redis.call('GETRANGE', KEYS[at], 56, 375)
  local head, tokens = false, false
  if first ~= '' then
    head, tokens = '', ''
    if #first >= 24 then
      local length, start, size = struct.unpack('<III', first)
      if length > 296 then
        head = redis.call('GETRANGE', KEYS[at], 80, 79 + length)
      else
        head = string.sub(first, 25, 24 + length)
      end
      if size > 0 then tokens = redis.call('GETRANGE', KEYS[at], start, start + size - 1) end
    end
  end
  reply[count + 1], reply[count + 2] = head, tokens
  count = count + 2
end
return reply
""",
    bare=True,
)

DISCARD = script("""
-- ARGV: now, partition, keys; gives how many were there, or a key that is held
local removed, holds = 0, live_holds(ARGV[2])
for at = 3, #ARGV do
  if is_held(holds, ARGV[at]) and number_of(ARGV[2], ARGV[at]) then return ARGV[at] end
end
for at = 3, #ARGV do
  if remove(ARGV[2], ARGV[at]) then removed = removed + 1 end
end
return removed
""")

KEYS = script("""
-- ARGV: now, partition, prefix
return matching(ARGV[2], ARGV[3])
""")

PARTITIONS = script("""
local reply = {}
for _, name in ipairs(call('SMEMBERS', ns .. ':P')) do
  if call('EXISTS', ns .. ':o:' .. name) == 1 then reply[#reply + 1] = name end
end
return reply
""")

SEAL = script("""
-- ARGV: now, partition
if call('EXISTS', ns .. ':o:' .. ARGV[2]) == 0 then return 0 end
go_on_when_full()
call('HSET', ns .. ':p:' .. ARGV[2], 'sealed', 1)
return 1
""")
