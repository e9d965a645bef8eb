"""The Lua scripts of the Redis store's holds (names as in ``scripts.py``)."""

from __future__ import annotations

from tokenplane.staging.redis_backend.scripts import script

HOLD = script("""
-- ARGV: now, partition, hold id and prefix, seconds; gives the expiry. Ended holds of others go.
local now, name = clock(), ns .. ':h:' .. ARGV[2]
local expiry = exact(now + tonumber(ARGV[4]))
call('ZREMRANGEBYSCORE', name, '-inf', exact(now))
call('ZADD', name, expiry, ARGV[3])
return expiry
""")

EXTEND = script("""
-- ARGV: now, partition, hold id and prefix, seconds; gives 1, or 0 if the hold had ended
local now, name = clock(), ns .. ':h:' .. ARGV[2]
local expiry = call('ZSCORE', name, ARGV[3])
if not expiry or tonumber(expiry) <= now then return 0 end
go_on_when_full()
call('ZADD', name, exact(now + tonumber(ARGV[4])), ARGV[3])
return 1
""")

END = script("""
-- ARGV: now, partition, hold id and prefix
return call('ZREM', ns .. ':h:' .. ARGV[2], ARGV[3])
""")

HELD = script("""
-- ARGV: now, partition, keys; gives a key that is there and held, or nothing
local holds = live_holds(ARGV[2])
for at = 3, #ARGV do
  if is_held(holds, ARGV[at]) and number_of(ARGV[2], ARGV[at]) then return ARGV[at] end
end
return false
""")
