-- Gives waiting tasks of a model to a worker, the most urgent first. In no moment is a task in no list.
-- ARGV: retention, slug, worker, seconds of the lease, seconds that RQ keeps a worker's index, how many tasks
-- to end at most that RQ's tools took (nobody else is served meanwhile), the rule of the order (see `set_rule`),
-- one new owner for each task wanted.
-- Gives {id, owner, attempt, queue, priority, accepted_us, seconds waited, data, prompt ids, fingerprint,
-- outputs, '1' if a step has taken it before, cached tokens, '1' if it is suspected of the death of a worker,
-- length of the log, sampling defaults of the first attempt} for each.

local slug, worker, lease, index_seconds, limit = ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[6])

local function take(id, task, owner)
  ensure_task(slug, id)
  ensure(slug, 'set', K.rq_worker .. worker .. K.rq_worker_executions)
  local composite, stamp, cost = id .. ':' .. owner, utcformat(now_us), tonumber(task.cost) or 0
  local length = call('XLEN', K.log .. id)
  local suspect = is_suspect(crashes_of(task, length))
  leave(task.queue, slug, id)
  serve(task.queue, slug, cost)
  note_owned(slug, cost)
  local attempt = call('HINCRBY', K.run .. id, 'attempt', 1)
  -- Until the worker tells its place there, it is taken to be the next that starts.
  call('HSET', K.run .. id, 'owner', owner, 'worker', worker, 'claimed_at', seconds(now_us),
    'position', '0', 'tokens_ahead', '0', 'waiting_for', suspect and 'suspect' or 'capacity',
    -- Until its worker confirms the claim with a renewal: the reply may be lost, and then no worker has the task.
    'claimed_length', length, 'standing', 'untouched', 'lease_seconds', lease)
  call('ZADD', K.leases, seconds(now_us + lease * 1000000), id)
  call('HSET', K.rq_job .. id, 'status', 'started', 'started_at', stamp, 'last_heartbeat', stamp,
    'worker_name', worker)
  call('PERSIST', K.rq_job .. id)
  -- +inf: whoever runs `rq info` would otherwise end a job whose entry has expired.
  call('ZADD', K.rq_wip .. task.queue, '+inf', composite)
  call('ZADD', K.rq_executions .. id, '+inf', owner)
  call('HSET', K.rq_execution .. composite, 'id', owner, 'job_id', id, 'worker_name', worker,
    'created_at', seconds(now_us), 'last_heartbeat', seconds(now_us))
  call('SADD', K.rq_worker .. worker .. K.rq_worker_executions, composite)
  return { id, owner, attempt, task.queue, task.priority, task.accepted_us,
    seconds(math.max(0, now_us - task.accepted_us)), call('HGET', K.rq_job .. id, 'data'),
    task.prompt_ids or '', task.fingerprint or '', task.n or '1', task.scheduled_at and '1' or '',
    task.cached_tokens or '0', suspect and '1' or '', length, task.sampling_defaults or '' }
end

-- The next queue, with indexes that fit what waits: they are built again, once, where they do not.
local is_lined_up_again = false
local function next_line()
  local queue, decided_by = next_queue(slug)
  if queue then
    ensure_queue(slug, queue)
  end
  local fits = queue and is_lined_up(queue, slug) or not queue and all_waiting(slug) == 0
  if fits or is_lined_up_again then
    return fits and queue, decided_by
  end
  is_lined_up_again = true
  note_damage(slug)
  line_up_again(slug)
  return next_queue(slug)
end

ensure_model(slug)
set_rule(slug, ARGV[7])
local claimed, next_owner, num_dead = {}, 8, 0
local queue, decided_by = next_line()
while ARGV[next_owner] and queue and num_dead < limit do
  local id = call('ZRANGE', K.order .. queue, 0, 0)[1]
  local task = waiting_task_or_lost(queue, slug, id)
  if task and call('HGET', K.rq_job .. id, 'status') == 'queued' then
    note_turn(slug, decided_by)
    claimed[#claimed + 1] = take(id, task, ARGV[next_owner])
    next_owner = next_owner + 1
  else
    num_dead = num_dead + 1
    if task then
      -- Cancelled or deleted with RQ's own tools.
      finish_taken(id, task)
    end
  end
  queue, decided_by = next_line()
end
measure_after_claim(slug, (all_waiting(slug)))

if #claimed > 0 then
  call('EXPIRE', K.rq_worker .. worker .. K.rq_worker_executions, index_seconds)
end
return claimed
