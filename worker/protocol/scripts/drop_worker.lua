-- Forgets a worker. ARGV: retention, name.

local name = ARGV[2]
local record = call('GET', K.worker .. name)
if record then
  call('ZREM', K.ready .. cjson.decode(record).slug, name)
end
call('DEL', K.worker .. name)
call('ZREM', K.workers, name)
