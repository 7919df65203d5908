-- Which line goes first. The rule, with the limits that the workers' settings give it:
--   1. promoted tasks, those that have waited for `max_waiting_us`: the line goes first that has gone without a
--      claim for longest, so that tenants take turns;
--   2. the best class, a task's own less one for each `ageing_us` that it has waited, down to 0;
--   3. within a class the tenant that was served the fewest tokens;
--   4. the task that was accepted first.
-- While age puts a task before one of a better class, or of the same, whose tenant was served less, every second
-- claim goes by class and tokens alone: a tenant's backlog grows old, and must not keep others out.
-- One tenant alone, or all without fair sharing: promoted and older tasks of a class go by acceptance.
-- The cost of a claim does not grow with what waits.

-- At most this number of lines is compared where no index gives the first.
local MOST_COMPARED = 100
local PROMOTED = -1

-- As the last claim of the model gave it, else the engine's defaults.
local function rule_of(slug)
  local ageing_us, max_waiting_us, fair = unpack(call('HMGET', K.rule .. slug, 'ageing_us', 'max_waiting_us', 'fair'))
  return { ageing_us = tonumber(ageing_us) or 30000000, max_waiting_us = tonumber(max_waiting_us) or 120000000,
    fair = fair ~= '0' }
end

-- The class as which a task counts.
local function aged(rule, class, accepted_us)
  local waited_us = now_us - accepted_us
  if waited_us >= rule.max_waiting_us then
    return PROMOTED
  end
  return math.min(class, math.max(0, class - math.floor(waited_us / rule.ageing_us)))
end

-- The last acceptance with which a task of `class` counts as class `wanted` or better.
local function aged_until(rule, class, wanted)
  if wanted >= class then
    return math.huge
  elseif wanted < PROMOTED then
    return -math.huge
  end
  local promoted = now_us - rule.max_waiting_us
  return wanted == PROMOTED and promoted or math.max(promoted, now_us - (class - wanted) * rule.ageing_us)
end

-- The promoted line that was not served for longest. A line that was not served since `limit` has a promoted head.
local function promoted_queue(slug, limit, oldest)
  for _, queue in ipairs(call('ZRANGE', K.unserved .. slug, 0, MOST_COMPARED - 1)) do
    local head = call('ZSCORE', K.queues .. slug, queue)
    if head and tonumber(head) <= limit then
      return queue
    end
  end
  return oldest
end

-- Of the lines of a class whose head was accepted by `limit`, the one whose tenant was served the least: counter,
-- head, queue. Exact among the first hundred by tokens served, else among the hundred oldest.
local function least_served(slug, class, limit)
  local group = slug .. ':' .. class
  local best
  local function compare(counter, head, queue)
    if not best or counter < best.counter or (counter == best.counter and head < best.head) then
      best = { counter = counter, head = head, queue = queue }
    end
  end
  local first = call('ZRANGE', K.lines .. group, 0, limit == math.huge and 0 or MOST_COMPARED - 1, 'WITHSCORES')
  for i = 1, #first, 2 do
    local head, queue = head_and_queue(first[i])
    if head <= limit then
      compare(tonumber(first[i + 1]), head, queue)
      return best
    end
  end
  local oldest = call('ZRANGE', K.heads .. group, '-inf', whole(limit), 'BYSCORE', 'LIMIT', 0, MOST_COMPARED, 'WITHSCORES')
  for i = 1, #oldest, 2 do
    local _, tenant = class_and_tenant(oldest[i])
    compare(tonumber(call('ZSCORE', K.shares .. slug, tenant) or 0), tonumber(oldest[i + 1]), oldest[i])
  end
  return best
end

-- The best class as which anything counts that waits; nil if nothing does.
local function best_class(slug, rule)
  local best
  for class = 0, NUM_CLASSES - 1 do
    local head = call('ZRANGE', K.heads .. slug .. ':' .. class, 0, 0, 'WITHSCORES')[2]
    local counts_as = head and aged(rule, class, head)
    if head and (not best or counts_as < best) then
      best = counts_as
    end
  end
  return best
end

-- Of one class the line that goes first among several tenants.
local function first_by_tokens(slug, rule, counts_as)
  local best
  for class = 0, NUM_CLASSES - 1 do
    local limit = class >= counts_as and aged_until(rule, class, counts_as)
    local line = limit and least_served(slug, class, limit)
    if line and (not best or line.counter < best.counter
        or (line.counter == best.counter and line.head < best.head)) then
      best = line
    end
  end
  return best and best.queue
end

local function first_by_arrival(slug, rule, counts_as)
  local best, best_head
  for class = 0, NUM_CLASSES - 1 do
    local queue, head = unpack(call('ZRANGE', K.heads .. slug .. ':' .. class, 0, 0, 'WITHSCORES'))
    head = tonumber(head)
    if head and aged(rule, class, head) == counts_as and (not best or head < best_head) then
      best, best_head = queue, head
    end
  end
  return best
end

-- By class and tokens alone.
local function first_without_age(slug)
  for class = 0, NUM_CLASSES - 1 do
    local line = least_served(slug, class, math.huge)
    if line then
      return line.queue
    end
  end
end

-- Whether `other` waits although age alone puts `queue` before it: its tenant was served less.
local function is_kept_out(slug, other, queue)
  local _, its_tenant = class_and_tenant(other)
  local _, tenant = class_and_tenant(queue)
  local its_counter, counter = call('ZSCORE', K.shares .. slug, its_tenant), call('ZSCORE', K.shares .. slug, tenant)
  return its_counter and counter and tonumber(its_counter) < tonumber(counter)
end

-- The queue whose head is claimed next, nil if nothing waits; and for `note_turn` what decided: 'age' where age
-- keeps another tenant out, 'class' where it was that one's turn, else nil.
local function next_queue(slug)
  local rule, oldest = rule_of(slug), call('ZRANGE', K.queues .. slug, 0, 0, 'WITHSCORES')
  local counts_as = oldest[1] and best_class(slug, rule)
  if not counts_as then
    return nil
  elseif not (rule.fair and is_contested(slug)) then
    return counts_as == PROMOTED and oldest[1] or first_by_arrival(slug, rule, counts_as)
  end
  local by_age
  if counts_as == PROMOTED then
    by_age = promoted_queue(slug, now_us - rule.max_waiting_us, oldest[1])
  else
    by_age = first_by_tokens(slug, rule, counts_as)
  end
  local other = first_without_age(slug)
  if not other or not by_age or not is_kept_out(slug, other, by_age) then
    return by_age or other
  elseif call('HGET', K.rule .. slug, 'turn') == 'age' then
    return other, 'class'
  end
  return by_age, 'age'
end

local function note_turn(slug, decided_by)
  if decided_by then
    call('HSET', K.rule .. slug, 'turn', decided_by)
  end
end

-- Stores a rule if it is another than before: '<ageing_us>:<max_waiting_us>:<1 if tenants share fairly, else 0>'.
local function set_rule(slug, text)
  local ageing_us, max_waiting_us, fair = string.match(text, '^(%d+):(%d+):([01])$')
  local kept = call('HMGET', K.rule .. slug, 'ageing_us', 'max_waiting_us', 'fair')
  if ageing_us and (kept[1] ~= ageing_us or kept[2] ~= max_waiting_us or kept[3] ~= fair) then
    call('HSET', K.rule .. slug, 'ageing_us', ageing_us, 'max_waiting_us', max_waiting_us, 'fair', fair)
  end
end
