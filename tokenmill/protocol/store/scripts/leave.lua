-- A reader is not there any more. ARGV: retention, id, reader, '1' if its client went away.
-- Gives 1 if that ended the task.

local id = ARGV[2]
call('ZREM', K.readers .. id, ARGV[3])
if is_read(id) then
  return 0
elseif ARGV[4] == '1' then
  return end_as_unread(id) and 1 or 0
end
call('ZREM', K.watched, id)
return 0
