-- Ends and ownership of tasks. Invariants: a task has one owner or none, and ends once. `task` is its run hash as a
-- table.

-- RQ's status and registry for each final status.
local rq_ends = {
  completed = { 'finished', K.rq_finished },
  failed = { 'failed', K.rq_failed },
  cancelled = { 'canceled', K.rq_canceled },
}

local function is_started(id)
  return call('HGET', K.rq_job .. id, 'status') == 'started'
end

-- Ends a claim. `num_served`: tokens charged to the tenant instead of the cost.
local function release(id, task, num_served)
  local composite = id .. ':' .. task.owner
  call('ZREM', K.leases, id)
  call('ZREM', K.rq_wip .. task.queue, composite)
  call('DEL', K.rq_execution .. composite, K.rq_executions .. id)
  call('SREM', K.rq_worker .. (task.worker or '') .. K.rq_worker_executions, composite)
  call('HDEL', K.run .. id, 'owner', 'waiting_for', 'tokens_ahead', 'position', 'standing', 'claimed_length')
  call('HDEL', K.run .. id, 'lease_seconds')
  local cost = tonumber(task.cost) or 0
  adjust_owned(task.slug, -cost)
  charge(task.queue, task.slug, num_served - cost)
end

-- Returns a claimed task to its position in the queue. It is charged again when claimed.
local function requeue(id, task)
  ensure_model_keys(task.slug)
  ensure_queue_keys(task.slug, task.queue)
  ensure_task_keys(task.slug, id)
  release(id, task, 0)
  call('HSET', K.rq_job .. id, 'status', 'queued', 'started_at', '', 'worker_name', '')
  enqueue(id, task)
end

local function add_to_totals(task, how)
  local totals = K.totals .. task.slug
  call('HINCRBY', totals, 'finished:' .. how.reason, 1)
  if how.is_client_error then
    call('HINCRBY', totals, 'client_errors', 1)
  end
  call('HINCRBY', totals, 'prompt_tokens', how.prompt_tokens)
  call('HINCRBY', totals, 'completion_tokens', how.completion_tokens)
end

-- A job that RQ's tools have deleted stays deleted: a partial hash would break them.
local function end_rq_job(id, queue, status)
  if call('EXISTS', K.rq_job .. id) == 0 then
    return
  end
  local rq_status, registry = unpack(rq_ends[status])
  call('HSET', K.rq_job .. id, 'status', rq_status, 'ended_at', utcformat(now_us))
  call('ZADD', registry .. queue, seconds(now_us + retention_ms * 1000), id)
end

-- All keys of a task expire together.
local function expire_task(id, task, ms)
  for _, key in ipairs({ K.run .. id, K.log .. id, K.rq_job .. id, K.rq_results .. id, task.idempotency }) do
    call('PEXPIRE', key, ms)
  end
  unlist_later(id, task.queue, now_us + ms * 1000)
end

-- how: status, reason, prompt_tokens, completion_tokens; is_client_error: the request was invalid; is_against_owner:
-- the owner must not take this end for its own settlement. A task with a webhook is kept until that is delivered.
local function finish(id, task, how)
  ensure_model_keys(task.slug)
  ensure_queue_keys(task.slug, task.queue)
  ensure_task_keys(task.slug, id)
  local run = K.run .. id
  if task.owner then
    local computed = math.max(0, how.prompt_tokens - (tonumber(task.cached_tokens) or 0))
    local served, cost = computed + how.completion_tokens, tonumber(task.cost) or 0
    -- If the task did not complete, only the tokens served count as work.
    record_drained(task.slug, how.status == 'completed' and cost or math.min(cost, served))
    release(id, task, served)
  else
    dequeue(task.queue, task.slug, id)
  end
  end_rq_job(id, task.queue, how.status)
  call('HSET', run, 'terminal', how.status, 'reason', how.reason, 'finished_at', seconds(now_us))
  if task.owner and not how.is_against_owner then
    call('HSET', run, 'last_owner', task.owner)
  end
  add_to_totals(task, how)
  if task.on_disconnect then
    call('DEL', K.readers .. id)
    call('ZREM', K.watched, id)
  end
  if task.webhook then
    add_to_outbox(id)
  end
  expire_task(id, task, task.webhook and math.max(retention_ms, OUTBOX_MS) or retention_ms)
end

-- The outputs without an end, and the number of those with one.
local function open_outputs(task)
  local open, count = {}, tonumber(task.n) or 1
  for index = 0, count - 1 do
    if not task['ended:' .. index] then
      open[#open + 1] = index
    end
  end
  return open, count - #open
end

local function usage_json(task, how)
  return '{"prompt_tokens":' .. how.prompt_tokens .. ',"completion_tokens":' .. how.completion_tokens
    .. ',"total_tokens":' .. (how.prompt_tokens + how.completion_tokens) .. ',"cached_tokens":'
    .. (tonumber(task.cached_tokens) or 0) .. '}'
end

-- Ends a task without its worker: each output without an end gets one, the last of them with `done`. `error_json` may
-- be 'null'.
local function finish_without_owner(id, task, how, error_json)
  local length = call('XLEN', K.log .. id)
  local open, num_ended = open_outputs(task)
  how.prompt_tokens = tonumber(task.prompt_tokens) or 0
  how.completion_tokens = length - num_ended
  for nth, index in ipairs(open) do
    local members = '"finish_reason":"' .. how.reason .. '"'
    if nth == #open then
      members = members .. ',"done":true,"usage":' .. usage_json(task, how) .. ',"error":' .. error_json
    elseif error_json ~= 'null' then
      members = members .. ',"error":' .. error_json
    end
    append(id, length + nth - 1, '', '""', whole(index), members)
  end
  finish(id, task, how)
end

-- The run hash of a waiting task. Without one (evicted or deleted) the task leaves the queue, and nil is returned.
local function waiting_task(queue, slug, id)
  local task = hash(K.run .. id)
  if task.slug and task.queue then
    return task
  end
  dequeue(queue, slug, id)
  unlist(id, queue)
  call('PEXPIRE', K.rq_job .. id, retention_ms)
  return nil
end

local function finish_cancelled(id, task)
  finish_without_owner(id, task, { status = 'cancelled', reason = 'cancelled' }, 'null')
end

-- Cancels a task and notifies its owner.
local function cancel(id, task)
  finish_cancelled(id, task)
  if task.owner then
    call('PUBLISH', K.control, '{"cancel": "' .. id .. '"}')
  end
end

-- The status in which the task ended while `owner` owned it; nil if it did not.
local function ended_under(id, owner)
  local last_owner, terminal = unpack(call('HMGET', K.run .. id, 'last_owner', 'terminal'))
  return last_owner == owner and terminal or nil
end

-- Adds RQ's result row of the job.
local function add_rq_result(id, task, fields)
  local row = { 'worker_name', task.worker or '' }
  if task.owner then
    row = { 'worker_name', task.worker or '', 'execution_id', task.owner, 'execution_started_at',
      task.claimed_at or '', 'execution_ended_at', seconds(now_us) }
  end
  for name, value in pairs(fields) do
    if value ~= '' then
      row[#row + 1] = name
      row[#row + 1] = value
    end
  end
  call('XADD', K.rq_results .. id, 'MAXLEN', '~', K.max_results, '*', unpack(row))
end
