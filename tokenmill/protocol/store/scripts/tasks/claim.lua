-- Claims waiting tasks of a model for a worker, the most urgent first. A task is always either queued or leased.
-- ARGV: retention, slug, worker, lease in seconds, lifetime of RQ's index of a worker's executions in seconds,
-- maximum number of tasks to end that RQ's tools removed, rule (see `store_rule`), one new owner for each task
-- wanted. Returns for each task names and values of the record `Claimed`.

local slug, worker, lease, index_seconds, limit = ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[6])

-- Sets fields that were lost by hand from the queue, which has them too: without them the claim would fail between
-- two writes.
local function restore_fields(id, task)
  local lost = {}
  if not tonumber(task.accepted_us) then
    lost.accepted_us = call('ZSCORE', K.order .. task.queue, id)
  end
  if not tonumber(task.priority) then
    lost.priority = string.match(task.queue, ':(%d+):[^:]*$')
  end
  for name, value in pairs(lost) do
    task[name] = value
    call('HSET', K.run .. id, name, value)
  end
end

local function claim(id, task, owner)
  restore_fields(id, task)
  ensure_task_keys(slug, id)
  ensure_type(slug, 'set', K.rq_worker .. worker .. K.rq_worker_executions)
  local composite, stamp, cost = id .. ':' .. owner, utcformat(now_us), tonumber(task.cost) or 0
  local length = call('XLEN', K.log .. id)
  local suspect = is_suspect(crashes_of(task, length))
  dequeue(task.queue, slug, id)
  charge_claim(task.queue, slug, cost)
  adjust_owned(slug, cost)
  local attempt = call('HINCRBY', K.run .. id, 'attempt', 1)
  -- Until the worker reports a position, the task is assumed to be scheduled next.
  call('HSET', K.run .. id, 'owner', owner, 'worker', worker, 'claimed_at', seconds(now_us),
    'position', '0', 'tokens_ahead', '0', 'waiting_for', suspect and 'suspect' or 'capacity',
    -- Until the worker confirms the claim with a renewal: if this reply is lost, no worker has the task.
    'claimed_length', length, 'standing', 'untouched', 'lease_seconds', lease)
  call('ZADD', K.leases, seconds(now_us + lease * 1000000), id)
  call('HSET', K.rq_job .. id, 'status', 'started', 'started_at', stamp, 'last_heartbeat', stamp,
    'worker_name', worker)
  call('PERSIST', K.rq_job .. id)
  -- With a time, `rq info` would end the job once it has passed.
  call('ZADD', K.rq_wip .. task.queue, '+inf', composite)
  call('ZADD', K.rq_executions .. id, '+inf', owner)
  call('HSET', K.rq_execution .. composite, 'id', owner, 'job_id', id, 'worker_name', worker,
    'created_at', seconds(now_us), 'last_heartbeat', seconds(now_us))
  call('SADD', K.rq_worker .. worker .. K.rq_worker_executions, composite)
  return { 'id', id, 'owner', owner, 'attempt', attempt, 'queue', task.queue, 'priority', task.priority,
    'accepted_us', task.accepted_us, 'waited_seconds', seconds(math.max(0, now_us - task.accepted_us)),
    'data', call('HGET', K.rq_job .. id, 'data'), 'prompt_ids', task.prompt_ids or '',
    'fingerprint', task.fingerprint or '', 'sampling_defaults', task.sampling_defaults or '',
    'num_outputs', task.n or '1', 'has_started', task.scheduled_at and '1' or '',
    'cached_tokens', task.cached_tokens or '0', 'suspect', suspect and '1' or '', 'tenant', task.tenant or '',
    'request_id', task.request_id or '', 'num_entries', length }
end

-- The next queue. If the indexes contradict the queues they are rebuilt, once per call.
local is_rebuilt = false
local function next_indexed_queue()
  local queue, decided_by = next_queue(slug)
  if queue then
    ensure_queue_keys(slug, queue)
  end
  local fits = queue and is_indexed(queue, slug) or not queue and waiting_of_model(slug) == 0
  if fits or is_rebuilt then
    return fits and queue, decided_by
  end
  is_rebuilt = true
  mark_damaged(slug)
  rebuild_index(slug)
  return next_queue(slug)
end

ensure_model_keys(slug)
store_rule(slug, ARGV[7])
local claimed, next_owner, num_dead = {}, 8, 0
local queue, decided_by = next_indexed_queue()
while ARGV[next_owner] and queue and num_dead < limit do
  local id = call('ZRANGE', K.order .. queue, 0, 0)[1]
  local task = waiting_task_or_finish_lost(queue, slug, id)
  if task and call('HGET', K.rq_job .. id, 'status') == 'queued' then
    record_turn(slug, decided_by)
    claimed[#claimed + 1] = claim(id, task, ARGV[next_owner])
    next_owner = next_owner + 1
  else
    num_dead = num_dead + 1
    if task then
      -- Cancelled or deleted with RQ's tools.
      finish_removed_job(id, task)
    end
  end
  queue, decided_by = next_indexed_queue()
end
measure_from_claim(slug, (waiting_of_model(slug)))

if #claimed > 0 then
  call('EXPIRE', K.rq_worker .. worker .. K.rq_worker_executions, index_seconds)
end
return claimed
