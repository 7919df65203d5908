-- A reader is there, or still there. Only tasks that end with their last reader remember it.
-- ARGV: retention, id, reader, seconds after which it has lapsed.

local id = ARGV[2]
local on_disconnect, terminal = unpack(call('HMGET', K.run .. id, 'on_disconnect', 'terminal'))
if on_disconnect == 'cancel' and not terminal then
  local lapses = seconds(now_us + ARGV[4] * 1000000)
  call('ZADD', K.readers .. id, lapses, ARGV[3])
  call('PEXPIRE', K.readers .. id, whole(ARGV[4] * 1000))
  call('ZADD', K.watched, 'GT', lapses, id)
end
