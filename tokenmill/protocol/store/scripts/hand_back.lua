-- Puts tasks back into their queues for others. ARGV: retention, JSON of the error of one that is to blame for
-- its worker's end ('' if that was no crash), RQ's exception of it, type of RQ's result; id and owner of each.
-- Returns the number of tasks put back, {id, reason of each failure}: such a task comes back when its lease lapses.

local is_crash = ARGV[2] ~= ''
local poison = { error_json = ARGV[2], exc_string = ARGV[3], result_type = ARGV[4] }
local returned, num_returned = {}, 0

local function let_back(id, owner)
  local task = hash(K.run .. id)
  if task.owner ~= owner then
    return
  end
  check_record(id, task)
  task.id = id
  if not is_started(id) then
    finish_taken(id, task)
  elseif is_crash and note_crash(id, task) then
    end_as_poison(id, task, poison)
  else
    returned[#returned + 1] = task
  end
end

for i = 5, #ARGV, 2 do
  isolate(ARGV[i], let_back, ARGV[i], ARGV[i + 1])
end

-- The youngest first, so that each goes to the very front.
table.sort(returned, function(a, b)
  return tonumber(a.accepted_us) > tonumber(b.accepted_us)
end)
for _, task in ipairs(returned) do
  num_returned = num_returned + (isolate(task.id, put_back, task.id, task) and 1 or 0)
end
return { num_returned, failures }
