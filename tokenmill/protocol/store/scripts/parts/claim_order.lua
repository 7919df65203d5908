-- Decides from which queue the next task is claimed. The order, with limits from the workers' settings:
--   1. Promoted tasks: those that have waited for `max_waiting_us`. Among them the queue goes first that has not been
--      claimed from for longest, so that tenants take turns.
--   2. The best effective class: a task's class minus one for each `ageing_us` it has waited, at least 0.
--   3. Within a class the tenant that was served the fewest tokens.
--   4. The task that was accepted first.
-- If ageing alone puts a task before one of a less served tenant, every second claim ignores age. Otherwise the old
-- backlog of one tenant would starve the others. With one tenant, or without fair sharing, tasks of equal class are
-- ordered by acceptance. The cost of a claim does not grow with the number of waiting tasks.

-- At most this many queues are compared if no index has the first.
local MAX_COMPARED = 100
local PROMOTED = -1

-- The rule stored by the last claim of the model, or the default.
local function rule_of(slug)
  local ageing_us, max_waiting_us, fair = unpack(call('HMGET', K.rule .. slug, 'ageing_us', 'max_waiting_us', 'fair'))
  return { ageing_us = tonumber(ageing_us) or 30000000, max_waiting_us = tonumber(max_waiting_us) or 120000000,
    fair = fair ~= '0' }
end

-- The class of a task after ageing.
local function effective_class(rule, class, accepted_us)
  local waited_us = now_us - accepted_us
  if waited_us >= rule.max_waiting_us then
    return PROMOTED
  end
  return math.min(class, math.max(0, class - math.floor(waited_us / rule.ageing_us)))
end

-- The latest acceptance at which a task of `class` has reached the effective class `wanted`.
local function accepted_until(rule, class, wanted)
  if wanted >= class then
    return math.huge
  elseif wanted < PROMOTED then
    return -math.huge
  end
  local promoted = now_us - rule.max_waiting_us
  return wanted == PROMOTED and promoted or math.max(promoted, now_us - (class - wanted) * rule.ageing_us)
end

-- The promoted queue that has not been claimed from for longest. A queue that was last claimed from before `limit`
-- has a promoted head.
local function promoted_queue(slug, limit, oldest)
  for _, queue in ipairs(call('ZRANGE', K.unserved .. slug, 0, MAX_COMPARED - 1)) do
    local head = call('ZSCORE', K.queues .. slug, queue)
    if head and tonumber(head) <= limit then
      return queue
    end
  end
  return oldest
end

-- Among the queues of a class whose head was accepted by `limit`, the one of the least served tenant, as counter,
-- head and queue. Exact among the first hundred by tokens served, otherwise among the hundred oldest.
local function least_served_queue(slug, class, limit)
  local group = slug .. ':' .. class
  local best
  local function compare(counter, head, queue)
    if not best or counter < best.counter or (counter == best.counter and head < best.head) then
      best = { counter = counter, head = head, queue = queue }
    end
  end
  local first = call('ZRANGE', K.lines .. group, 0, limit == math.huge and 0 or MAX_COMPARED - 1, 'WITHSCORES')
  for i = 1, #first, 2 do
    local head, queue = parse_member(first[i])
    if head <= limit then
      compare(tonumber(first[i + 1]), head, queue)
      return best
    end
  end
  local oldest = call('ZRANGE', K.heads .. group, '-inf', whole(limit), 'BYSCORE', 'LIMIT', 0, MAX_COMPARED,
    'WITHSCORES')
  for i = 1, #oldest, 2 do
    local _, tenant = class_and_tenant(oldest[i])
    compare(tonumber(call('ZSCORE', K.shares .. slug, tenant) or 0), tonumber(oldest[i + 1]), oldest[i])
  end
  return best
end

-- The best effective class of all waiting tasks; nil if none waits.
local function best_effective_class(slug, rule)
  local best
  for class = 0, NUM_CLASSES - 1 do
    local head = call('ZRANGE', K.heads .. slug .. ':' .. class, 0, 0, 'WITHSCORES')[2]
    local effective = head and effective_class(rule, class, head)
    if head and (not best or effective < best) then
      best = effective
    end
  end
  return best
end

-- The first queue of an effective class, with several tenants.
local function queue_by_tokens(slug, rule, effective)
  local best
  for class = 0, NUM_CLASSES - 1 do
    local limit = class >= effective and accepted_until(rule, class, effective)
    local entry = limit and least_served_queue(slug, class, limit)
    if entry and (not best or entry.counter < best.counter
        or (entry.counter == best.counter and entry.head < best.head)) then
      best = entry
    end
  end
  return best and best.queue
end

local function queue_by_arrival(slug, rule, effective)
  local best, best_head
  for class = 0, NUM_CLASSES - 1 do
    local queue, head = unpack(call('ZRANGE', K.heads .. slug .. ':' .. class, 0, 0, 'WITHSCORES'))
    head = tonumber(head)
    if head and effective_class(rule, class, head) == effective and (not best or head < best_head) then
      best, best_head = queue, head
    end
  end
  return best
end

-- The first queue by class and tokens served, without ageing.
local function queue_without_ageing(slug)
  for class = 0, NUM_CLASSES - 1 do
    local entry = least_served_queue(slug, class, math.huge)
    if entry then
      return entry.queue
    end
  end
end

-- Whether ageing puts `queue` before `other`, although the tenant of `other` was served less.
local function is_starved(slug, other, queue)
  local _, its_tenant = class_and_tenant(other)
  local _, tenant = class_and_tenant(queue)
  local its_counter, counter = call('ZSCORE', K.shares .. slug, its_tenant), call('ZSCORE', K.shares .. slug, tenant)
  return its_counter and counter and tonumber(its_counter) < tonumber(counter)
end

-- Returns the queue to claim from next, or nil; and what decided, for `record_turn`: 'age' if ageing passed over
-- another tenant, 'class' if it was that tenant's turn, else nil.
local function next_queue(slug)
  local rule, oldest = rule_of(slug), call('ZRANGE', K.queues .. slug, 0, 0, 'WITHSCORES')
  local effective = oldest[1] and best_effective_class(slug, rule)
  if not effective then
    return nil
  elseif not (rule.fair and has_several_tenants(slug)) then
    return effective == PROMOTED and oldest[1] or queue_by_arrival(slug, rule, effective)
  end
  local by_age
  if effective == PROMOTED then
    by_age = promoted_queue(slug, now_us - rule.max_waiting_us, oldest[1])
  else
    by_age = queue_by_tokens(slug, rule, effective)
  end
  local other = queue_without_ageing(slug)
  if not other or not by_age or not is_starved(slug, other, by_age) then
    return by_age or other
  elseif call('HGET', K.rule .. slug, 'turn') == 'age' then
    return other, 'class'
  end
  return by_age, 'age'
end

local function record_turn(slug, decided_by)
  if decided_by then
    call('HSET', K.rule .. slug, 'turn', decided_by)
  end
end

-- Stores a rule if it differs: '<ageing_us>:<max_waiting_us>:<1 for fair sharing, else 0>'.
local function store_rule(slug, text)
  local ageing_us, max_waiting_us, fair = string.match(text, '^(%d+):(%d+):([01])$')
  local kept = call('HMGET', K.rule .. slug, 'ageing_us', 'max_waiting_us', 'fair')
  if ageing_us and (kept[1] ~= ageing_us or kept[2] ~= max_waiting_us or kept[3] ~= fair) then
    call('HSET', K.rule .. slug, 'ageing_us', ageing_us, 'max_waiting_us', max_waiting_us, 'fair', fair)
  end
end
