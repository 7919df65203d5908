-- Who waits, and in which order. The sorted set `order` is the truth; RQ's list follows it, so that RQ's
-- tools show the same. Knows no owner and no end.

-- Registries are looked through this often, or once a retention where that is shorter.
local TIDY_MS = 60000

-- "<cost>:<cost of all before it>"
local function split_cost(entry)
  local cost, before = string.match(entry, '^(%d+):(-?%d+)$')
  return tonumber(cost), tonumber(before)
end

local function before_of(queue, id)
  local _, before = split_cost(call('HGET', K.cost .. queue, id))
  return before
end

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

-- Costs are summed up front, so that "tokens ahead" is a difference of two.
local function account(queue, id, cost, rank, follower)
  local key, before = K.cost .. queue, nil
  if follower then
    before = before_of(queue, follower) - cost
    for _, earlier in ipairs(rank > 0 and call('ZRANGE', K.order .. queue, 0, rank - 1) or {}) do
      local its_cost, its_before = split_cost(call('HGET', key, earlier))
      call('HSET', key, earlier, its_cost .. ':' .. whole(its_before - cost))
    end
  else
    before = tonumber(call('HGET', key, ':appended') or 0)
    call('HINCRBY', key, ':appended', cost)
  end
  call('HSET', key, id, whole(cost) .. ':' .. whole(before))
  call('HINCRBY', key, ':total', cost)
end

-- What waits of a model, by class: counters, as every submission asks for their sums.
local function count_waiting(queue, slug, num_tasks, cost)
  local key, class = K.waiting .. slug, class_and_tenant(queue)
  call('HINCRBY', key, 'tokens:' .. class, cost)
  if call('HINCRBY', key, 'tasks:' .. class, num_tasks) == 0 then
    call('HDEL', key, 'tokens:' .. class, 'tasks:' .. class)
  end
end

-- Tasks of a class, and their tokens.
local function waiting_in(slug, class)
  local tasks, tokens = unpack(call('HMGET', K.waiting .. slug, 'tasks:' .. class, 'tokens:' .. class))
  return tonumber(tasks or 0), tonumber(tokens or 0)
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
  local queue, slug, order = task.queue, task.slug, K.order .. task.queue
  call('ZADD', order, task.accepted_us, id)
  local rank = call('ZRANK', order, id)
  local follower = call('ZRANGE', order, rank + 1, rank + 1)[1]
  list(queue, id, rank, follower)
  account(queue, id, tonumber(task.cost), rank, follower)
  watch(slug, id, task)
  count_waiting(queue, slug, 1, task.cost)
  line_up(queue, slug)
  call('SADD', K.rq_queues, K.rq_queue .. queue)
  call('ZADD', K.shown .. slug, 'NX', tidy_at(now_us), queue)
  call('PUBLISH', K.wake .. slug, queue)
end

local function leave(queue, slug, id)
  local order, costs = K.order .. queue, K.cost .. queue
  if call('ZREM', order, id) == 0 then
    return
  end
  unwatch(slug, id)
  call('LREM', K.rq_queue .. queue, 1, id)
  local cost = split_cost(call('HGET', costs, id))
  call('HDEL', costs, id)
  call('HINCRBY', costs, ':total', -cost)
  if call('EXISTS', order) == 0 then
    call('DEL', costs)
  end
  count_waiting(queue, slug, -1, -cost)
  line_up(queue, slug)
end
