-- Removes the record of a file that no running batch reads. ARGV: retention, id, tenant or '' for any. Returns 1, 0 if
-- there is no such file, -1 if it is in use.

local id, wanted = ARGV[2], ARGV[3]
local tenant, uses = unpack(call('HMGET', K.file .. id, 'tenant', 'uses'))
if not tenant or (wanted ~= '' and wanted ~= tenant) then
  -- Also of a record that was deleted by hand.
  if not tenant then
    call('ZREM', K.files_expiring, id)
  end
  return 0
end
if (tonumber(uses) or 0) > 0 then
  return -1
end
call('DEL', K.file .. id)
call('ZREM', K.files .. tenant, id)
call('ZREM', K.files_expiring, id)
return 1
