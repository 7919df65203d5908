-- Tasks of which Redis lost keys, by eviction or because they were deleted by hand. They end with the error `lost`.

-- Whether this server may have evicted keys; true if unknown.
local function may_evict()
  local known, stats = pcall(call, 'INFO', 'stats')
  if not known or (tonumber(string.match(stats, 'evicted_keys:(%d+)')) or 1) > 0 then
    return true
  end
  local _, memory = pcall(call, 'INFO', 'memory')
  local policy = type(memory) == 'string' and string.match(memory, 'maxmemory_policy:([%w-]+)')
  return policy ~= 'noeviction' and string.match(memory, 'maxmemory:(%d+)') ~= '0'
end

-- Ends a task whose RQ job is not in the state in which the scripts left it. Returns the task's status. If RQ's tools
-- cancelled or deleted the job, the task is cancelled; if the server may have evicted it, the task is lost.
local function finish_removed_job(id, task)
  if call('EXISTS', K.rq_job .. id) == 1 or not may_evict() then
    finish_cancelled(id, task)
    return 'cancelled'
  end
  finish_without_owner(id, task, { status = 'failed', reason = 'error', is_against_owner = true }, LOST.error_json)
  return 'failed'
end

-- Ends the log of a task without a usable run hash, unless it has an end, and expires the task's other keys.
local function finish_without_run_hash(id, queue)
  local last, length = call('XREVRANGE', K.log .. id, '+', '-', 'COUNT', 1)[1], call('XLEN', K.log .. id)
  if last and not string.find(table.concat(last[2], ' '), '"done":true', 1, true) then
    append(id, length, '', '""', '0',
      '"finish_reason":"error","done":true,"usage":'
        .. usage_json({}, { prompt_tokens = 0, completion_tokens = length }) .. ',"error":' .. LOST.error_json)
  end
  -- `append` has set a field of it.
  call('DEL', K.run .. id)
  if queue then
    unlist(id, queue)
  end
  if call('EXISTS', K.rq_job .. id) == 1 and queue then
    call('HSET', K.rq_job .. id, 'worker_name', '')
    end_rq_job(id, queue, 'failed')
  end
  call('ZREM', K.leases, id)
  call('ZREM', K.watched, id)
  call('DEL', K.readers .. id)
  for _, key in ipairs({ K.log .. id, K.rq_job .. id, K.rq_results .. id }) do
    call('PEXPIRE', key, retention_ms)
  end
end

-- Removes a claim from RQ's registries. `composite`: "<id>:<owner>".
local function drop_execution(queue, id, composite)
  local execution = K.rq_execution .. composite
  local worker = call('HGET', execution, 'worker_name')
  call('ZREM', K.rq_wip .. queue, composite)
  call('DEL', execution)
  call('ZREM', K.rq_executions .. id, string.sub(composite, #id + 2))
  if worker then
    call('SREM', K.rq_worker .. worker .. K.rq_worker_executions, composite)
  end
end

-- The run hash of a waiting task. Without one the task leaves the queue as lost, and nil is returned.
local function waiting_task_or_finish_lost(queue, slug, id)
  local task = waiting_task(queue, slug, id)
  if not task then
    finish_without_run_hash(id, queue)
  end
  return task
end
