-- Checks that a task's record can be changed. Redis does not roll scripts back, so this runs before the first write.

-- Whether the run hash has the fields that waiting and ending need.
local function is_complete(task)
  return task.slug and string.match(task.queue or '', ':%d+:[^:]*$') and tonumber(task.accepted_us)
    and tonumber(task.cost)
end

local function check_type(expected, key)
  local found = call('TYPE', key).ok
  if found ~= expected and found ~= 'none' then
    error(key .. ' is a ' .. found .. ', not a ' .. expected, 0)
  end
end

-- Raises an error unless every key of this task that a requeue or an end uses has the right type.
local function check_record(id, task)
  if not is_complete(task) then
    error('the run hash is incomplete', 0)
  end
  check_type('stream', K.log .. id)
  check_type('stream', K.rq_results .. id)
  check_type('hash', K.rq_job .. id)
end
