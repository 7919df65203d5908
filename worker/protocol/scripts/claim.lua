-- Gives waiting tasks of a model to a worker, the most urgent first. In no moment is a task in no list.
-- ARGV: retention, slug, worker, seconds of the lease, seconds that RQ keeps a worker's index, how many tasks
-- to end at most that RQ's tools took (nobody else is served meanwhile), one new owner for each task wanted.
-- Gives {id, owner, attempt, queue, priority, accepted_us, seconds waited, data, prompt ids, fingerprint,
-- outputs, '1' if a step has taken it before, cached tokens, length of the log} for each.

local slug, worker, lease, index_seconds, limit = ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[6])

local function take(id, task, owner)
  local composite, stamp = id .. ':' .. owner, utcformat(now_us)
  leave(task.queue, slug, id)
  local attempt = call('HINCRBY', K.run .. id, 'attempt', 1)
  -- Until the worker tells its place there, it is taken to be the next that starts.
  call('HSET', K.run .. id, 'owner', owner, 'worker', worker, 'claimed_at', seconds(now_us),
    'position', '0', 'tokens_ahead', '0', 'waiting_for', 'capacity')
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
    task.cached_tokens or '0', call('XLEN', K.log .. id) }
end

local heads = {}
for _, queue in ipairs(call('SMEMBERS', K.queues .. slug)) do
  heads[#heads + 1] = head_of(queue)
end

local claimed, next_owner, num_dead = {}, 7, 0
while ARGV[next_owner] and #heads > 0 and num_dead < limit do
  local first = 1
  for i = 2, #heads do
    if goes_before(heads[i], heads[first]) then
      first = i
    end
  end
  local head = heads[first]
  local task = waiting_task(head.queue, slug, head.id)
  if task and call('HGET', K.rq_job .. head.id, 'status') == 'queued' then
    claimed[#claimed + 1] = take(head.id, task, ARGV[next_owner])
    next_owner = next_owner + 1
  else
    num_dead = num_dead + 1
    if task then
      -- Cancelled or deleted with RQ's own tools.
      finish_cancelled(head.id, task)
    end
  end
  local follower = head_of(head.queue)
  if follower then
    heads[first] = follower
  else
    table.remove(heads, first)
  end
end

if #claimed > 0 then
  call('EXPIRE', K.rq_worker .. worker .. K.rq_worker_executions, index_seconds)
end
return claimed
