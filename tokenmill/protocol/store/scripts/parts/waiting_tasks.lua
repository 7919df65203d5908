-- The waiting tasks of each queue in order of acceptance. The sorted set `order` is authoritative; RQ's list mirrors
-- it for RQ's tools. A missing index entry marks the model as damaged and is no error.

-- Interval of tidying RQ's registries; shorter if the retention is.
local TIDY_MS = 60000

local function next_tidying(from_us)
  return seconds(from_us + math.min(retention_ms, TIDY_MS) * 1000)
end

-- Inserts a task into RQ's list at its rank in `order`.
local function add_to_rq_list(queue, id, rank, follower)
  local key = K.rq_queue .. queue
  if not follower then
    call('RPUSH', key, id)
  elseif rank == 0 then
    call('LPUSH', key, id)
  else
    local earlier = call('ZRANGE', K.order .. queue, rank - 1, rank - 1)[1]
    -- RQ's tools may have removed that task from the list.
    if call('LINSERT', key, 'AFTER', earlier, id) < 1 then
      call('LPUSH', key, id)
    end
  end
end

-- Adjusts the counters of a class or of a tenant.
local function adjust_counters(slug, key, name, num_tasks, cost)
  local tokens = call('HINCRBY', key, 'tokens:' .. name, cost)
  local tasks = call('HINCRBY', key, 'tasks:' .. name, num_tasks)
  if tasks < 0 or tokens < 0 then
    mark_damaged(slug)
  end
  if tasks <= 0 then
    call('HDEL', key, 'tokens:' .. name, 'tasks:' .. name)
  end
end

-- Counts waiting tasks by class and by tenant, because every submission reads the sums.
local function adjust_waiting(queue, slug, num_tasks, cost)
  local class, tenant = class_and_tenant(queue)
  adjust_counters(slug, K.waiting .. slug, class, num_tasks, cost)
  adjust_counters(slug, K.tenants .. slug, tenant, num_tasks, cost)
end

local function read_counters(key, name)
  local tasks, tokens = unpack(call('HMGET', key, 'tasks:' .. name, 'tokens:' .. name))
  return math.max(0, tonumber(tasks or 0)), math.max(0, tonumber(tokens or 0))
end

-- Waiting tasks of a class, and their tokens.
local function waiting_of_class(slug, class)
  return read_counters(K.waiting .. slug, class)
end

-- Waiting tasks of a queue's tenant, and their tokens.
local function waiting_of_tenant(slug, queue)
  local _, tenant = class_and_tenant(queue)
  return read_counters(K.tenants .. slug, tenant)
end

-- Waiting tasks of a model, and their tokens.
local function waiting_of_model(slug)
  local tasks, tokens = 0, 0
  for class = 0, NUM_CLASSES - 1 do
    local some_tasks, some_tokens = waiting_of_class(slug, class)
    tasks, tokens = tasks + some_tasks, tokens + some_tokens
  end
  return tasks, tokens
end

-- Inserts a task by acceptance: at the end if new, mostly at the front if requeued. `task` is its run hash as a
-- table.
local function enqueue(id, task)
  local queue, slug, order, cost = task.queue, task.slug, K.order .. task.queue, tonumber(task.cost) or 0
  if call('ZADD', order, 'NX', task.accepted_us, id) == 0 then
    return
  end
  local rank = call('ZRANK', order, id)
  add_to_rq_list(queue, id, rank, call('ZRANGE', order, rank + 1, rank + 1)[1])
  call('HSET', K.cost .. queue, id, whole(cost))
  add_to_sums(queue, tonumber(task.accepted_us), cost)
  add_deadline(slug, id, task)
  adjust_waiting(queue, slug, 1, cost)
  update_index(queue, slug)
  call('SADD', K.rq_queues, K.rq_queue .. queue)
  call('ZADD', K.shown .. slug, 'NX', next_tidying(now_us), queue)
  call('PUBLISH', K.wake .. slug, queue)
end

local function dequeue(queue, slug, id)
  local order, costs = K.order .. queue, K.cost .. queue
  local accepted_us, cost = tonumber(call('ZSCORE', order, id) or nil), tonumber(call('HGET', costs, id) or nil)
  call('LREM', K.rq_queue .. queue, 1, id)
  remove_deadline(slug, id)
  if not accepted_us then
    return
  end
  call('ZREM', order, id)
  if cost then
    call('HDEL', costs, id)
    add_to_sums(queue, accepted_us, -cost)
  else
    mark_damaged(slug)
  end
  if call('EXISTS', order) == 0 then
    call('DEL', costs)
  end
  adjust_waiting(queue, slug, -1, -(cost or tonumber(call('HGET', K.run .. id, 'cost') or 0)))
  update_index(queue, slug)
end

-- Recomputes the sums and counters of a model from its waiting tasks. O(waiting tasks).
local function rebuild_counters(slug)
  call('DEL', K.waiting .. slug, K.tenants .. slug)
  for _, queue in ipairs(call('ZRANGE', K.shown .. slug, 0, -1)) do
    call('DEL', K.cost .. queue)
    local order = call('ZRANGE', K.order .. queue, 0, -1, 'WITHSCORES')
    for i = 1, #order, 2 do
      local cost = tonumber(call('HGET', K.run .. order[i], 'cost') or 0)
      call('HSET', K.cost .. queue, order[i], whole(cost))
      add_to_sums(queue, tonumber(order[i + 1]), cost)
      adjust_waiting(queue, slug, 1, cost)
    end
  end
end
