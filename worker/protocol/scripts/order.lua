-- Who waits, and in which order. The sorted set `order` is the truth; RQ's list follows it, so that RQ's
-- tools show the same. Knows no owner and no end.

-- A waiting head gains one priority class for each minute.
local AGEING_US = 60000000
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
  call('SADD', K.queues .. slug, queue)
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
    call('SREM', K.queues .. slug, queue)
  end
end

-- The head of a queue: id, accepted (microseconds), class (with ageing). Nil for an empty one.
local function head_of(queue)
  local head = call('ZRANGE', K.order .. queue, 0, 0, 'WITHSCORES')
  if not head[1] then
    return nil
  end
  local accepted = tonumber(head[2])
  local class = tonumber(string.match(queue, ':(%d+):[^:]*$'))
  local aged = class - math.floor((now_us - accepted) / AGEING_US)
  return { queue = queue, id = head[1], accepted = accepted, class = aged }
end

local function goes_before(a, b)
  if a.class ~= b.class then
    return a.class < b.class
  end
  return a.accepted < b.accepted
end

-- Cost of the first `count` tasks of a queue with this head. A little more if one among them was cancelled.
local function cost_of_first(head, count)
  local total = tonumber(call('HGET', K.cost .. head.queue, ':total'))
  local at = call('ZRANGE', K.order .. head.queue, count, count)[1]
  if not at then
    return total
  end
  local cost, before = split_cost(call('HGET', K.cost .. head.queue, at))
  return math.min(before - before_of(head.queue, head.id), total - cost)
end

-- Tasks of another queue that go before one with this class and acceptance.
local function count_before(head, own_class, accepted)
  if head.class > own_class then
    return 0
  elseif head.class < own_class then
    return call('ZCARD', K.order .. head.queue)
  end
  return call('ZCOUNT', K.order .. head.queue, '-inf', '(' .. accepted)
end

-- Tasks and tokens before a waiting task, as things stand: O(queues + log n). Nil if it does not wait.
local function standing(queue, slug, id)
  local position = call('ZRANK', K.order .. queue, id)
  if not position then
    return nil
  end
  local own = head_of(queue)
  local accepted = call('ZSCORE', K.order .. queue, id)
  local tokens = cost_of_first(own, position)
  for _, other in ipairs(call('SMEMBERS', K.queues .. slug)) do
    local head = other ~= queue and head_of(other)
    local count = head and count_before(head, own.class, accepted) or 0
    if count > 0 then
      position = position + count
      tokens = tokens + cost_of_first(head, count)
    end
  end
  return position, tokens
end
