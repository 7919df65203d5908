-- Repairs what RQ's own tools moved: RQ's list of a queue and our order of it name the same tasks.
-- ARGV: retention, slug, number of tasks to treat at most.
-- Returns {ids cancelled}, {ids lost}, {id, reason of each failure}.

local slug, limit = ARGV[2], tonumber(ARGV[3])
local cancelled, lost, num_mended = {}, {}, 0

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
  local task = waiting_task_or_lost(queue, slug, id)
  if task and call('HGET', K.rq_job .. id, 'status') == 'queued' then
    local rank = call('ZRANK', K.order .. queue, id)
    list(queue, id, rank, call('ZRANGE', K.order .. queue, rank + 1, rank + 1)[1])
  elseif task then
    local ended = finish_taken(id, task) == 'cancelled' and cancelled or lost
    ended[#ended + 1] = id
  end
end

-- Lets `treat` repair what stands in `ids` and not in `others`; what is over the limit, the next call.
local function mend_those(queue, ids, others, treat)
  local known = {}
  for _, id in ipairs(others) do
    known[id] = true
  end
  for _, id in ipairs(ids) do
    if num_mended >= limit then
      return
    elseif not known[id] then
      num_mended = num_mended + (isolate(id, treat, queue, id) and 1 or 0)
      if #failures >= 2 * limit then
        return
      end
    end
  end
end

-- RQ's tools take a job from RQ's list, or put one there; a difference shows in the lengths.
local function mend(queue)
  local key, order = K.rq_queue .. queue, K.order .. queue
  if num_mended >= limit or call('LLEN', key) == call('ZCARD', order) then
    return
  end
  local listed, ordered = call('LRANGE', key, 0, -1), call('ZRANGE', order, 0, -1)
  mend_those(queue, listed, ordered, unlist)
  mend_those(queue, ordered, listed, relist)
end

for _, queue in ipairs(call('ZRANGE', K.shown .. slug, 0, -1)) do
  isolate(queue, mend, queue)
end
return { cancelled, lost, failures }
