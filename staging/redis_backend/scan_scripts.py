"""The Lua scripts of the Redis store's scans (names as in ``scripts.py``)."""

from __future__ import annotations

from typing import Final

from tokenplane.staging.redis_backend.scripts import script

SCAN_LEASE_S: Final = 300
"""How long a scan may rest between two rows before what was removed meanwhile is forgotten."""

SCAN = script("""
-- ARGV: now, partition, prefix, scan id, seconds; gives key, row number, ...
local found, reply = matching(ARGV[2], ARGV[3]), {}
for at = 1, #found, 4000 do
  local last = math.min(at + 3999, #found)
  local seqs = call('ZMSCORE', ns .. ':o:' .. ARGV[2], unpack(found, at, last))
  for i = 1, #seqs do
    reply[#reply + 1] = found[at + i - 1]
    reply[#reply + 1] = seqs[i]
  end
end
if #found > 0 then
  go_on_when_full()
  call('ZADD', ns .. ':s', exact(clock() + tonumber(ARGV[5])), ARGV[4])
end
return reply
""")

SCAN_READ = script("""
-- ARGV: now, partition, scan id, seconds, then key, row number, ...; gives rows
if call('ZSCORE', ns .. ':s', ARGV[3]) then
  go_on_when_full()
  call('ZADD', ns .. ':s', exact(clock() + tonumber(ARGV[4])), ARGV[3])
end
local reply = {}
for at = 5, #ARGV, 2 do
  local key, seq = ARGV[at], ARGV[at + 1]
  local row = place('m', ARGV[2], key)
  if call('ZSCORE', ns .. ':o:' .. ARGV[2], key) ~= seq then row = ns .. ':g:m:' .. seq end
  reply[#reply + 1] = call('GET', row)
end
return reply
""")

SCAN_END = script("""
-- ARGV: now, scan id
call('ZREM', ns .. ':s', ARGV[2])
forget_removed()
return 1
""")
