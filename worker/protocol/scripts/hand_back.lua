-- Puts tasks back into their queues for others. ARGV: retention, JSON of the error of one that is to blame for
-- its worker's end ('' if that was no crash), RQ's exception of it, type of RQ's result; id and owner of each.
-- Gives how many.

local is_crash = ARGV[2] ~= ''
local poison = { error_json = ARGV[2], exc_string = ARGV[3], result_type = ARGV[4] }
local returned = {}
for i = 5, #ARGV, 2 do
  local id = ARGV[i]
  local task = hash(K.run .. id)
  if task.owner == ARGV[i + 1] then
    task.id = id
    if not is_started(id) then
      finish_cancelled(id, task)
    elseif is_crash and note_crash(id, task) then
      end_as_poison(id, task, poison)
    else
      returned[#returned + 1] = task
    end
  end
end

-- The youngest first, so that each goes to the very front.
table.sort(returned, function(a, b)
  return tonumber(a.accepted_us) > tonumber(b.accepted_us)
end)
for _, task in ipairs(returned) do
  put_back(task.id, task)
end
return #returned
