-- Ends tasks that waited too long: longer than a limit of their own, or than any task may.
-- ARGV: retention, slug, microseconds that a task may wait, type of RQ's result, number of tasks to treat at most;
-- and of each limit its name ('' for that wait), the JSON of its error, in which {} stands for the seconds, and RQ's
-- exception of it. Returns {ids timed out}, {id, reason of each failure}.

local slug, max_wait_us, result_type, limit = ARGV[2], tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])
local missed = {}
for i = 6, #ARGV, 3 do
  missed[ARGV[i]] = { error_json = ARGV[i + 1], exc_string = ARGV[i + 2] }
end
local timed_out = {}

local function time_out(id, task, name)
  check_record(id, task)
  local error_json = string.gsub(missed[name].error_json, '{}', task[name] or '{}')
  add_result(id, task, { type = result_type, exc_string = missed[name].exc_string })
  finish_here(id, task, { status = 'failed', reason = 'timeout' }, error_json)
  timed_out[#timed_out + 1] = id
end

-- A limit of its own has passed while it waited.
local function end_overdue(id)
  local task = hash(K.run .. id)
  if task.slug then
    local name = first_limit(task)
    if not name then
      error('the run hash has no limit', 0)
    end
    time_out(id, task, name)
  else
    unwatch(slug, id)
  end
end

local function end_waiting(queue, id)
  local task = waiting_task_or_lost(queue, slug, id)
  if task then
    time_out(id, task, '')
  end
end

-- The oldest of a queue that have waited too long. One that cannot be ended stays at the front: the search goes
-- behind it.
local function end_oldest(queue, oldest)
  local skipped = 0
  for _ = 1, 2 * limit do
    local id = call('ZRANGEBYSCORE', K.order .. queue, '-inf', oldest, 'LIMIT', skipped, 1)[1]
    if not id or #timed_out >= limit then
      return
    elseif not isolate(id, end_waiting, queue, id) then
      skipped = skipped + 1
    end
  end
end

treat_due(K.deadlines .. slug, limit, end_overdue)
local oldest = whole(now_us - max_wait_us)
for _, queue in ipairs(call('ZRANGEBYSCORE', K.queues .. slug, '-inf', oldest)) do
  isolate(queue, end_oldest, queue, oldest)
end
return { timed_out, failures }
