-- Ends tasks that have waited for longer than one of their own limits, or than any task may. ARGV: retention, slug,
-- maximum wait in microseconds, type of RQ's result, maximum number of tasks; then for each limit its name ('' for
-- the maximum wait), the JSON of its error with {} for the seconds, and RQ's exception of it. Returns {ids timed
-- out}, {id, reason of each failure}.

local slug, max_wait_us, result_type, limit = ARGV[2], tonumber(ARGV[3]), ARGV[4], tonumber(ARGV[5])
local errors = {}
for i = 6, #ARGV, 3 do
  errors[ARGV[i]] = { error_json = ARGV[i + 1], exc_string = ARGV[i + 2] }
end
local timed_out = {}

local function time_out(id, task, name)
  check_record(id, task)
  local error_json = string.gsub(errors[name].error_json, '{}', task[name] or '{}')
  add_rq_result(id, task, { type = result_type, exc_string = errors[name].exc_string })
  finish_without_owner(id, task, { status = 'failed', reason = 'timeout' }, error_json)
  timed_out[#timed_out + 1] = id
end

-- One of the task's own limits has passed.
local function end_past_deadline(id)
  local task = hash(K.run .. id)
  if task.slug then
    local name = first_limit(task)
    if not name then
      error('the run hash has no limit', 0)
    end
    time_out(id, task, name)
  else
    remove_deadline(slug, id)
  end
end

local function end_waiting(queue, id)
  local task = waiting_task_or_finish_lost(queue, slug, id)
  if task then
    time_out(id, task, '')
  end
end

-- Ends the oldest tasks of a queue. Those that fail stay at the front and are skipped.
local function end_oldest(queue, oldest)
  local skipped = 0
  for _ = 1, 2 * limit do
    local id = call('ZRANGEBYSCORE', K.order .. queue, '-inf', oldest, 'LIMIT', skipped, 1)[1]
    if not id or #timed_out >= limit then
      return
    elseif not protect(id, end_waiting, queue, id) then
      skipped = skipped + 1
    end
  end
end

process_due(K.deadlines .. slug, limit, end_past_deadline)
local oldest = whole(now_us - max_wait_us)
for _, queue in ipairs(call('ZRANGEBYSCORE', K.queues .. slug, '-inf', oldest)) do
  protect(queue, end_oldest, queue, oldest)
end
return { timed_out, failures }
