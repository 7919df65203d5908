-- Whether the record of a task is fit for a change: Redis does not roll a script back, so this is asked before its
-- first write.

-- The fields of a run hash without which a task neither waits nor ends.
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

-- Raises an error unless all that a put-back or an end reads and writes of this task can be read and written.
local function check_record(id, task)
  if not is_complete(task) then
    error('the run hash is incomplete', 0)
  end
  check_type('stream', K.log .. id)
  check_type('stream', K.rq_results .. id)
  check_type('hash', K.rq_job .. id)
  -- Only shown by RQ's tools.
  task.worker = task.worker or ''
end
