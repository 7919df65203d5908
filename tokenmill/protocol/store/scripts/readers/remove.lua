-- Removes a reader. ARGV: retention, id, reader, '1' if its client disconnected. Returns 1 if that cancelled the
-- task.

local id = ARGV[2]
call('ZREM', K.readers .. id, ARGV[3])
if has_readers(id) then
  return 0
elseif ARGV[4] == '1' then
  return cancel_unread(id) and 1 or 0
end
call('ZREM', K.watched, id)
return 0
