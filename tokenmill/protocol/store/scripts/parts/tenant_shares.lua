-- Counts the tokens served to each tenant of a model, for `claim_order.lua`: virtual counters after "Fairness in
-- Serving Large Language Models" (Sheng et al., OSDI 2024). `shares` has the counters of tenants with waiting tasks,
-- `away` those of the others. `lines` repeats a counter for each non-empty queue of its tenant.

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
  -- The lowest counters are dropped: most of them would be lifted to the minimum anyway.
  call('ZREMRANGEBYRANK', K.away .. slug, 0, -MAX_AWAY)
  call('ZADD', K.away .. slug, counter, tenant, counter, ':last')
  call('PEXPIRE', K.away .. slug, AWAY_MS)
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
