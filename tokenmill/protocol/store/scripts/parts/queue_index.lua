-- Indexes the queues that have waiting tasks, for `claim_order.lua`: one queue per class and tenant, its head the
-- oldest task. The tokens served are virtual counters after "Fairness in Serving Large Language Models" (Sheng et
-- al., OSDI 2024).

-- Counters of tenants without waiting tasks expire this long after the last such tenant was added.
local AWAY_MS = 3600000
-- Maximum number of counters of tenants without waiting tasks.
local MAX_AWAY = 10000
local NUM_CLASSES = tonumber(K.num_classes)

local function class_and_tenant(queue)
  local class, tenant = string.match(queue, ':(%d+):([^:]*)$')
  return tonumber(class), tenant
end

-- Members of equal score are sorted by text, so that of equal counters the oldest head comes first.
local function index_member(head, queue)
  return string.format('%020.0f', head) .. queue
end

local function parse_member(member)
  return tonumber(string.sub(member, 1, 20)), string.sub(member, 21)
end

-- Whether more than one tenant waits.
local function has_several_tenants(slug)
  return call('ZCARD', K.shares .. slug) > 1
end

-- The minimum counter of the waiting tenants, or the counter of the last one that waited.
local function minimum_counter(slug)
  return tonumber(call('ZRANGE', K.shares .. slug, 0, 0, 'WITHSCORES')[2]
    or call('ZSCORE', K.away .. slug, ':last') or 0)
end

-- A tenant has waiting tasks again. Its counter is lifted to the minimum: idle time earns no credit.
local function activate_tenant(slug, tenant)
  local away, minimum = K.away .. slug, minimum_counter(slug)
  local counter = whole(math.max(minimum, tonumber(call('ZSCORE', away, tenant) or 0)))
  call('ZADD', K.shares .. slug, counter, tenant)
  -- Lower counters would be lifted too, so they need not be kept.
  call('ZREM', away, tenant)
  call('ZREMRANGEBYSCORE', away, '-inf', whole(minimum))
  return counter
end

local function deactivate_tenant(slug, tenant)
  local counter = call('ZSCORE', K.shares .. slug, tenant)
  if not counter then
    return
  end
  call('ZREM', K.shares .. slug, tenant)
  -- Dropping the lowest counters loses the least.
  call('ZREMRANGEBYRANK', K.away .. slug, 0, -MAX_AWAY)
  call('ZADD', K.away .. slug, counter, tenant, counter, ':last')
  call('PEXPIRE', K.away .. slug, AWAY_MS)
end

-- The non-empty queues of the same tenant: queue, class, acceptance of the head.
local function queues_of_tenant(queue, slug)
  local queues = {}
  for class = 0, NUM_CLASSES - 1 do
    local name = string.gsub(queue, ':%d+:([^:]*)$', ':' .. class .. ':%1')
    local head = call('ZSCORE', K.queues .. slug, name)
    if head then
      queues[#queues + 1] = { queue = name, class = class, head = tonumber(head) }
    end
  end
  return queues
end

local function remove_from_index(queue, slug, group, tenant)
  call('ZREM', K.queues .. slug, queue)
  call('ZREM', K.unserved .. slug, queue)
  call('ZREM', K.heads .. group, queue)
  if #queues_of_tenant(queue, slug) == 0 then
    deactivate_tenant(slug, tenant)
  end
end

-- Must be called after each change of a queue: indexes its new head.
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

-- Adds `num_tokens` (may be negative) to the tokens served to a queue's tenant.
local function charge(queue, slug, num_tokens)
  local _, tenant = class_and_tenant(queue)
  local share = call('ZSCORE', K.shares .. slug, tenant)
  local counter = share or call('ZSCORE', K.away .. slug, tenant) or minimum_counter(slug)
  counter = whole(math.max(0, counter + num_tokens))
  if share then
    call('ZADD', K.shares .. slug, counter, tenant)
    for _, entry in ipairs(queues_of_tenant(queue, slug)) do
      call('ZADD', K.lines .. slug .. ':' .. entry.class, counter, index_member(entry.head, entry.queue))
    end
  else
    call('ZADD', K.away .. slug, counter, tenant)
    call('PEXPIRE', K.away .. slug, AWAY_MS)
  end
end

-- Charges a claimed task. Its cost is replaced by its tokens at the end of the claim, see `release`.
local function charge_claim(queue, slug, cost)
  call('ZADD', K.unserved .. slug, 'XX', whole(now_us), queue)
  charge(queue, slug, cost)
end
