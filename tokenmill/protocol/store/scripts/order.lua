-- Which tasks wait, and in which order. The sorted set `order` is the truth; RQ's list follows it, so that RQ's
-- tools show the same. Knows no owner and no end. A missing index entry is noted as damage and is no error.

-- Registries are looked through this often, or once a retention where that is shorter.
local TIDY_MS = 60000

local function tidy_at(from_us)
  return seconds(from_us + math.min(retention_ms, TIDY_MS) * 1000)
end

-- In RQ's list, at the place that `order` gives.
local function list(queue, id, rank, follower)
  local key = K.rq_queue .. queue
  if not follower then
    call('RPUSH', key, id)
  elseif rank == 0 then
    call('LPUSH', key, id)
  else
    local earlier = call('ZRANGE', K.order .. queue, rank - 1, rank - 1)[1]
    -- Somebody's tool may have taken that one from the list.
    if call('LINSERT', key, 'AFTER', earlier, id) < 1 then
      call('LPUSH', key, id)
    end
  end
end

-- Adds to the counters of one class or one tenant.
local function count_in(slug, key, name, num_tasks, cost)
  local tokens = call('HINCRBY', key, 'tokens:' .. name, cost)
  local tasks = call('HINCRBY', key, 'tasks:' .. name, num_tasks)
  if tasks < 0 or tokens < 0 then
    note_damage(slug)
  end
  if tasks <= 0 then
    call('HDEL', key, 'tokens:' .. name, 'tasks:' .. name)
  end
end

-- What waits of a model, by class and by tenant: counters, as every submission asks for their sums.
local function count_waiting(queue, slug, num_tasks, cost)
  local class, tenant = class_and_tenant(queue)
  count_in(slug, K.waiting .. slug, class, num_tasks, cost)
  count_in(slug, K.tenants .. slug, tenant, num_tasks, cost)
end

local function counted_in(key, name)
  local tasks, tokens = unpack(call('HMGET', key, 'tasks:' .. name, 'tokens:' .. name))
  return math.max(0, tonumber(tasks or 0)), math.max(0, tonumber(tokens or 0))
end

-- Tasks of a class, and their tokens.
local function waiting_in(slug, class)
  return counted_in(K.waiting .. slug, class)
end

-- Tasks of a queue's tenant, and their tokens.
local function waiting_of_tenant(slug, queue)
  local _, tenant = class_and_tenant(queue)
  return counted_in(K.tenants .. slug, tenant)
end

-- Tasks of a model, and their tokens.
local function all_waiting(slug)
  local tasks, tokens = 0, 0
  for class = 0, NUM_CLASSES - 1 do
    local some_tasks, some_tokens = waiting_in(slug, class)
    tasks, tokens = tasks + some_tasks, tokens + some_tokens
  end
  return tasks, tokens
end

-- To its place by acceptance: the end for a new task, mostly the front for one that comes back.
-- `task` is its run hash as a table.
local function enter(id, task)
  local queue, slug, order, cost = task.queue, task.slug, K.order .. task.queue, tonumber(task.cost) or 0
  if call('ZADD', order, 'NX', task.accepted_us, id) == 0 then
    return
  end
  local rank = call('ZRANK', order, id)
  list(queue, id, rank, call('ZRANGE', order, rank + 1, rank + 1)[1])
  call('HSET', K.cost .. queue, id, whole(cost))
  add_to_sums(queue, tonumber(task.accepted_us), cost)
  watch(slug, id, task)
  count_waiting(queue, slug, 1, cost)
  line_up(queue, slug)
  call('SADD', K.rq_queues, K.rq_queue .. queue)
  call('ZADD', K.shown .. slug, 'NX', tidy_at(now_us), queue)
  call('PUBLISH', K.wake .. slug, queue)
end

local function leave(queue, slug, id)
  local order, costs = K.order .. queue, K.cost .. queue
  local accepted_us, cost = tonumber(call('ZSCORE', order, id) or nil), tonumber(call('HGET', costs, id) or nil)
  call('LREM', K.rq_queue .. queue, 1, id)
  unwatch(slug, id)
  if not accepted_us then
    return
  end
  call('ZREM', order, id)
  if cost then
    call('HDEL', costs, id)
    add_to_sums(queue, accepted_us, -cost)
  else
    note_damage(slug)
  end
  if call('EXISTS', order) == 0 then
    call('DEL', costs)
  end
  count_waiting(queue, slug, -1, -(cost or tonumber(call('HGET', K.run .. id, 'cost') or 0)))
  line_up(queue, slug)
end

-- Builds the sums and counters of a model again from its orders and its tasks. Costs time for each waiting task.
local function count_again(slug)
  call('DEL', K.waiting .. slug, K.tenants .. slug)
  for _, queue in ipairs(call('ZRANGE', K.shown .. slug, 0, -1)) do
    call('DEL', K.cost .. queue)
    local order = call('ZRANGE', K.order .. queue, 0, -1, 'WITHSCORES')
    for i = 1, #order, 2 do
      local cost = tonumber(call('HGET', K.run .. order[i], 'cost') or 0)
      call('HSET', K.cost .. queue, order[i], whole(cost))
      add_to_sums(queue, tonumber(order[i + 1]), cost)
      count_waiting(queue, slug, 1, cost)
    end
  end
end
