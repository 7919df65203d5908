-- Requeues the tasks of a worker. ARGV: retention, JSON of the error `poison` ('' unless the worker crashed), RQ's
-- exception of it, type of RQ's result; id and owner of each. Returns the number of tasks requeued, {id, reason of
-- each failure}; a task that failed returns when its lease lapses.

local is_crash = ARGV[2] ~= ''
local poison = { error_json = ARGV[2], exc_string = ARGV[3], result_type = ARGV[4] }
local returned, num_returned = {}, 0

local function hand_back(id, owner)
  local task = hash(K.run .. id)
  if task.owner ~= owner then
    return
  end
  check_record(id, task)
  task.id = id
  if not is_started(id) then
    finish_removed_job(id, task)
  elseif is_crash and record_crash(id, task) then
    finish_poisoned(id, task, poison)
  else
    returned[#returned + 1] = task
  end
end

for i = 5, #ARGV, 2 do
  protect(ARGV[i], hand_back, ARGV[i], ARGV[i + 1])
end

-- The youngest first, because each goes to the front.
table.sort(returned, function(a, b)
  return tonumber(a.accepted_us) > tonumber(b.accepted_us)
end)
for _, task in ipairs(returned) do
  num_returned = num_returned + (protect(task.id, requeue, task.id, task) and 1 or 0)
end
return { num_returned, failures }
