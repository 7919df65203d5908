-- Registers or extends a reader of a task that is cancelled with its last reader; ignored for other tasks. ARGV:
-- retention, id, reader, lifetime in seconds.

local id = ARGV[2]
local on_disconnect, terminal = unpack(call('HMGET', K.run .. id, 'on_disconnect', 'terminal'))
if on_disconnect == 'cancel' and not terminal then
  local lapses = seconds(now_us + ARGV[4] * 1000000)
  call('ZADD', K.readers .. id, lapses, ARGV[3])
  -- The key lives as long as its last reader. Without an expiry `GT` has no effect.
  call('PEXPIRE', K.readers .. id, whole(ARGV[4] * 1000), 'NX')
  call('PEXPIRE', K.readers .. id, whole(ARGV[4] * 1000), 'GT')
  call('ZADD', K.watched, 'GT', lapses, id)
end
