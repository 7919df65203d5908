-- Cancels a task in any state. ARGV: retention, id. Returns its final status; nil if there is no such task.

local id = ARGV[2]
local task = hash(K.run .. id)
if not task.slug or not task.queue then
  return false
end
if not task.terminal then
  cancel(id, task)
end
return task.terminal or 'cancelled'
