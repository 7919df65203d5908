-- Deletes the record of a worker. ARGV: retention, name.

local name = ARGV[2]
local record = call('GET', K.worker .. name)
local readable, fields = pcall(cjson.decode, record)
if readable and type(fields) == 'table' and fields.slug then
  call('ZREM', K.ready .. fields.slug, name)
end
call('DEL', K.worker .. name)
call('ZREM', K.workers, name)
