-- Tasks of which Redis lost a part: an evicting server, or a hand, deleted keys. They are reported as lost.

-- Whether this server may have evicted keys. Unknown counts as yes.
local function may_evict()
  local known, stats = pcall(call, 'INFO', 'stats')
  if not known or (tonumber(string.match(stats, 'evicted_keys:(%d+)')) or 1) > 0 then
    return true
  end
  local _, memory = pcall(call, 'INFO', 'memory')
  local policy = type(memory) == 'string' and string.match(memory, 'maxmemory_policy:([%w-]+)')
  return policy ~= 'noeviction' and string.match(memory, 'maxmemory:(%d+)') ~= '0'
end

-- Ends a task whose RQ job is not in the state in which scripts left it. Returns the status of the task.
-- RQ's tools cancelled or deleted the job, which is a cancellation; or the server evicted it, which is a loss.
local function finish_taken(id, task)
  if call('EXISTS', K.rq_job .. id) == 1 or not may_evict() then
    finish_cancelled(id, task)
    return 'cancelled'
  end
  finish_here(id, task, { status = 'failed', reason = 'error', is_against_owner = true }, LOST.error_json)
  return 'failed'
end

-- Ends the log of a task whose run hash is gone or useless, unless the log has its end, and lets all else expire.
local function finish_without_run(id, queue)
  local last, length = call('XREVRANGE', K.log .. id, '+', '-', 'COUNT', 1)[1], call('XLEN', K.log .. id)
  if last and not string.find(table.concat(last[2], ' '), '"done":true', 1, true) then
    append(id, length, '', '""', '0',
      '"finish_reason":"error","done":true,"usage":'
        .. usage_json({}, { prompt_tokens = 0, completion_tokens = length }) .. ',"error":' .. LOST.error_json)
  end
  -- `append` notes the end there.
  call('DEL', K.run .. id)
  if call('EXISTS', K.rq_job .. id) == 1 and queue then
    call('HSET', K.rq_job .. id, 'worker_name', '')
    end_job(id, queue, 'failed')
  end
  call('ZREM', K.leases, id)
  call('ZREM', K.watched, id)
  call('DEL', K.readers .. id)
  for _, key in ipairs({ K.log .. id, K.rq_job .. id, K.rq_results .. id }) do
    call('PEXPIRE', key, retention_ms)
  end
end

-- Removes what shows a claim to RQ's tools. `composite`: "<id>:<owner>".
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

-- The run hash of a waiting task. Where that is gone, the task leaves the queue as lost, and nil is returned.
local function waiting_task_or_lost(queue, slug, id)
  local task = waiting_task(queue, slug, id)
  if not task then
    finish_without_run(id, queue)
  end
  return task
end
