-- Takes back what dead workers held, ends what waited too long or lost its readers with their server, and
-- mends what RQ's own tools moved.
-- ARGV: retention, slug, microseconds that a task may wait, type of RQ's result, how many tasks of a kind to
-- treat at most: nobody else is served meanwhile; and of each limit its name ('' for that wait), the JSON of
-- its error, in which {} stands for the seconds, and RQ's exception of it; the same of `poison`, which is no
-- limit. Gives {ids put back}, {ids timed out}, {ids cancelled}, {ids that are to blame for dead workers}.

local slug, max_wait_us, result_type, limit = ARGV[2], tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])
local missed = {}
for i = 6, #ARGV, 3 do
  missed[ARGV[i]] = { error_json = ARGV[i + 1], exc_string = ARGV[i + 2], result_type = result_type }
end
local returned, timed_out, cancelled, poisoned, num_mended = {}, {}, {}, {}, 0

local function take_back(id)
  local task = hash(K.run .. id)
  if not task.owner then
    call('ZREM', K.leases, id)
  elseif not is_started(id) then
    finish_cancelled(id, task)
    cancelled[#cancelled + 1] = id
  elseif note_crash(id, task) then
    end_as_poison(id, task, missed.poison)
    poisoned[#poisoned + 1] = id
  else
    put_back(id, task)
    returned[#returned + 1] = id
  end
end

local function time_out(id, task, name)
  local error_json = string.gsub(missed[name].error_json, '{}', task[name] or '{}')
  add_result(id, task, { type = result_type, exc_string = missed[name].exc_string })
  finish_here(id, task, { status = 'failed', reason = 'timeout' }, error_json)
  timed_out[#timed_out + 1] = id
end

-- One of its own limits has passed while it waited.
local function end_overdue(id)
  local task = hash(K.run .. id)
  if task.slug then
    time_out(id, task, first_limit(task))
  else
    unwatch(slug, id)
  end
end

local function end_waiting(queue, id)
  local task = waiting_task(queue, slug, id)
  if task then
    time_out(id, task, '')
  end
end

-- A job that waits in RQ's list but not in our order: RQ's `requeue` put it there though it has ended, or
-- somebody enqueued a job that is no task, which fails.
local function unlist(queue, id)
  call('LREM', K.rq_queue .. queue, 0, id)
  local slug_kept, terminal = unpack(call('HMGET', K.run .. id, 'slug', 'terminal'))
  local status = slug_kept and terminal or not slug_kept and 'failed'
  if status and call('HGET', K.rq_job .. id, 'status') == 'queued' then
    end_job(id, queue, status)
    call('PEXPIRE', K.rq_job .. id, retention_ms, 'NX')
  end
end

-- A job that waits in our order but not in RQ's list was cancelled or deleted with RQ's tools.
local function relist(queue, id)
  local task = waiting_task(queue, slug, id)
  if task and call('HGET', K.rq_job .. id, 'status') == 'queued' then
    local rank = call('ZRANK', K.order .. queue, id)
    list(queue, id, rank, call('ZRANGE', K.order .. queue, rank + 1, rank + 1)[1])
  elseif task then
    finish_cancelled(id, task)
    cancelled[#cancelled + 1] = id
  end
end

-- Lets `treat` put right what stands in `ids` and not in `others`; what is over the limit, the next call.
local function mend_those(queue, ids, others, treat)
  local known = {}
  for _, id in ipairs(others) do
    known[id] = true
  end
  for _, id in ipairs(ids) do
    if num_mended >= limit then
      return
    elseif not known[id] then
      treat(queue, id)
      num_mended = num_mended + 1
    end
  end
end

-- RQ's tools take a job from RQ's list, or put one there; ours notices by the lengths.
local function mend(queue)
  local key, order = K.rq_queue .. queue, K.order .. queue
  if num_mended >= limit or call('LLEN', key) == call('ZCARD', order) then
    return
  end
  local listed, ordered = call('LRANGE', key, 0, -1), call('ZRANGE', order, 0, -1)
  mend_those(queue, listed, ordered, unlist)
  mend_those(queue, ordered, listed, relist)
end

-- RQ expires its registries when somebody looks at them, and the one of cancelled jobs never.
local function tidy(queue)
  local left = call('LLEN', K.rq_queue .. queue) + call('ZCARD', K.rq_wip .. queue)
  for _, registry in ipairs({ K.rq_finished, K.rq_failed, K.rq_canceled }) do
    call('ZREMRANGEBYSCORE', registry .. queue, '-inf', seconds(now_us))
    left = left + call('ZCARD', registry .. queue)
  end
  if left == 0 then
    call('SREM', K.rq_queues, K.rq_queue .. queue)
    call('ZREM', K.shown .. slug, queue)
  else
    call('ZADD', K.shown .. slug, tidy_at(now_us), queue)
  end
end

local lapsed = call('ZRANGEBYSCORE', K.leases, '-inf', seconds(now_us), 'LIMIT', 0, limit)
for _, id in ipairs(lapsed) do
  take_back(id)
end
for _, id in ipairs(call('ZRANGEBYSCORE', K.watched, '-inf', seconds(now_us), 'LIMIT', 0, limit)) do
  if end_unread(id) then
    cancelled[#cancelled + 1] = id
  end
end
for _, queue in ipairs(call('ZRANGE', K.shown .. slug, 0, -1)) do
  mend(queue)
end
for _, id in ipairs(call('ZRANGEBYSCORE', K.deadlines .. slug, '-inf', seconds(now_us), 'LIMIT', 0, limit)) do
  end_overdue(id)
end
local oldest = whole(now_us - max_wait_us)
for _, queue in ipairs(call('ZRANGEBYSCORE', K.queues .. slug, '-inf', oldest)) do
  local count = limit - #timed_out
  for _, id in ipairs(call('ZRANGEBYSCORE', K.order .. queue, '-inf', oldest, 'LIMIT', 0, count)) do
    end_waiting(queue, id)
  end
end
for _, queue in ipairs(call('ZRANGEBYSCORE', K.shown .. slug, '-inf', seconds(now_us))) do
  tidy(queue)
end
return { returned, timed_out, cancelled, poisoned }
