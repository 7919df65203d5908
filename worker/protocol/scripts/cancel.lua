-- Ends a task as cancelled, whatever its state. ARGV: retention, id, JSON for the workers.
-- Gives the status in which it has ended, now or before; nil if there is no such task.

local id = ARGV[2]
local task = hash(K.run .. id)
if not task.slug then
  return false
end
if not task.terminal then
  finish_cancelled(id, task)
  if task.owner then
    call('PUBLISH', K.control, ARGV[3])
  end
end
return task.terminal or 'cancelled'
