-- Applies what RQ's tools did to waiting tasks, so that RQ's list of a queue and `order` have the same tasks. ARGV:
-- retention, slug, maximum number of tasks. Returns {ids cancelled}, {ids lost}, {id, reason of each failure}.

local slug, limit = ARGV[2], tonumber(ARGV[3])
local cancelled, lost, num_repaired = {}, {}, 0

-- A job in RQ's list but not in `order`: RQ's `requeue` added it after its end, or it is not a task and fails.
local function unlist(queue, id)
  call('LREM', K.rq_queue .. queue, 0, id)
  local slug_kept, terminal = unpack(call('HMGET', K.run .. id, 'slug', 'terminal'))
  local status = slug_kept and terminal or not slug_kept and 'failed'
  if status and call('HGET', K.rq_job .. id, 'status') == 'queued' then
    end_rq_job(id, queue, status)
    call('PEXPIRE', K.rq_job .. id, retention_ms, 'NX')
  end
end

-- A job in `order` but not in RQ's list: RQ's tools cancelled or deleted it.
local function relist(queue, id)
  local task = waiting_task_or_finish_lost(queue, slug, id)
  if task and call('HGET', K.rq_job .. id, 'status') == 'queued' then
    local rank = call('ZRANK', K.order .. queue, id)
    add_to_rq_list(queue, id, rank, call('ZRANGE', K.order .. queue, rank + 1, rank + 1)[1])
  elseif task then
    local ended = finish_removed_job(id, task) == 'cancelled' and cancelled or lost
    ended[#ended + 1] = id
  end
end

-- Calls `process` for the ids that are not in `others`, up to the limit.
local function repair_missing(queue, ids, others, process)
  local known = {}
  for _, id in ipairs(others) do
    known[id] = true
  end
  for _, id in ipairs(ids) do
    if num_repaired >= limit then
      return
    elseif not known[id] then
      num_repaired = num_repaired + (protect(id, process, queue, id) and 1 or 0)
      if #failures >= 2 * limit then
        return
      end
    end
  end
end

-- RQ's tools remove a job from RQ's list or add one, so the lengths differ.
local function repair_queue(queue)
  local key, order = K.rq_queue .. queue, K.order .. queue
  if num_repaired >= limit or call('LLEN', key) == call('ZCARD', order) then
    return
  end
  local listed, ordered = call('LRANGE', key, 0, -1), call('ZRANGE', order, 0, -1)
  repair_missing(queue, listed, ordered, unlist)
  repair_missing(queue, ordered, listed, relist)
end

for _, queue in ipairs(call('ZRANGE', K.shown .. slug, 0, -1)) do
  protect(queue, repair_queue, queue)
end
return { cancelled, lost, failures }
