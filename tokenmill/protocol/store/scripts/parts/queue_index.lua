-- Indexes the queues that have waiting tasks, for `claim_order.lua`: one queue per class and tenant, its head the
-- oldest task.

local function remove_from_index(queue, slug, group, tenant)
  call('ZREM', K.queues .. slug, queue)
  call('ZREM', K.unserved .. slug, queue)
  call('ZREM', K.heads .. group, queue)
  if #queues_of_tenant(queue, slug) == 0 then
    deactivate_tenant(slug, tenant)
  end
end

-- Indexes the present head of a queue. Must be called after each change of the queue.
local function update_index(queue, slug)
  local head = call('ZRANGE', K.order .. queue, 0, 0, 'WITHSCORES')[2]
  local was = call('ZSCORE', K.queues .. slug, queue) or nil
  if head == was then
    return
  end
  local class, tenant = class_and_tenant(queue)
  local group = slug .. ':' .. class
  if was then
    call('ZREM', K.lines .. group, index_member(was, queue))
  end
  if not head then
    return remove_from_index(queue, slug, group, tenant)
  end
  local since = call('ZSCORE', K.unserved .. slug, queue)
  local served_at = was and since and tonumber(since) > tonumber(was) and since or 0
  call('ZADD', K.queues .. slug, head, queue)
  call('ZADD', K.heads .. group, head, queue)
  call('ZADD', K.unserved .. slug, whole(math.max(head, served_at)), queue)
  local counter = call('ZSCORE', K.shares .. slug, tenant) or activate_tenant(slug, tenant)
  call('ZADD', K.lines .. group, counter, index_member(head, queue))
end

-- Whether a queue is indexed by its head.
local function is_indexed(queue, slug)
  local head = call('ZRANGE', K.order .. queue, 0, 0, 'WITHSCORES')[2]
  local class, tenant = class_and_tenant(queue)
  local group = slug .. ':' .. class
  return head and head == call('ZSCORE', K.queues .. slug, queue) and head == call('ZSCORE', K.heads .. group, queue)
    and call('ZSCORE', K.unserved .. slug, queue) and call('ZSCORE', K.shares .. slug, tenant)
    and call('ZSCORE', K.lines .. group, index_member(head, queue))
end

-- Rebuilds the indexes of a model's queues. Existing counters of tenants are kept.
local function rebuild_index(slug)
  call('DEL', K.queues .. slug, K.unserved .. slug)
  for class = 0, NUM_CLASSES - 1 do
    call('DEL', K.lines .. slug .. ':' .. class, K.heads .. slug .. ':' .. class)
  end
  local waits = {}
  for _, queue in ipairs(call('ZRANGE', K.shown .. slug, 0, -1)) do
    local _, tenant = class_and_tenant(queue)
    if tenant and call('EXISTS', K.order .. queue) == 1 then
      waits[tenant] = true
      update_index(queue, slug)
    end
  end
  for _, tenant in ipairs(call('ZRANGE', K.shares .. slug, 0, -1)) do
    if not waits[tenant] then
      deactivate_tenant(slug, tenant)
    end
  end
end

-- Charges a claimed task. Its cost is replaced by its tokens at the end of the claim, see `release`.
local function charge_claim(queue, slug, cost)
  call('ZADD', K.unserved .. slug, 'XX', whole(now_us), queue)
  charge(queue, slug, cost)
end
