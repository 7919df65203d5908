-- Tasks and tokens ahead of a waiting task. The cost does not grow with the number of queues.

-- Tasks and tokens of the same tenant ahead of a task: exact.
local function ahead_within_tenant(queue, slug, rule, accepted_us)
  local effective = effective_class(rule, class_and_tenant(queue), accepted_us)
  local tasks, tokens = 0, 0
  for _, entry in ipairs(queues_of_tenant(queue, slug)) do
    local better = accepted_until(rule, entry.class, effective - 1)
    local equal = math.min(accepted_until(rule, entry.class, effective), accepted_us - 1)
    local last = math.max(better, equal)
    if last == math.huge then
      tasks, tokens = tasks + call('ZCARD', K.order .. entry.queue), tokens + total_cost(entry.queue)
    elseif last >= entry.head then
      tasks = tasks + call('ZCOUNT', K.order .. entry.queue, '-inf', whole(last))
      tokens = tokens + cost_before(entry.queue, last + 1)
    end
  end
  return tasks, tokens
end

-- For the queues of other tenants in a class: how many tasks go before the head of this queue, and how many queues
-- take turns with it. `own`: the effective class of the task.
local function competing_queues(queue, slug, rule, class, own)
  local group, own_class, tenant = slug .. ':' .. class, class_and_tenant(queue)
  local num_queues = call('ZCARD', K.lines .. group) - (class == own_class and 1 or 0)
  local equal = num_queues
  if class > own then
    equal = call('ZCOUNT', K.heads .. group, '-inf', whole(accepted_until(rule, class, own)))
    equal = math.min(num_queues, math.max(0, equal - (class == own_class and 1 or 0)))
  end
  local older = call('ZCOUNT', K.heads .. group, '-inf', whole(accepted_until(rule, class, own - 1)))
  local counter = call('ZSCORE', K.shares .. slug, tenant)
  local less = counter and call('ZCOUNT', K.lines .. group, '-inf', '(' .. counter) or 0
  return math.min(equal, less + older), equal
end

-- Class -> { tasks, tokens } waiting of other tenants.
local function waiting_of_others(queue, slug)
  local of_others = {}
  for class = 0, NUM_CLASSES - 1 do
    of_others[class] = { waiting_of_class(slug, class) }
  end
  for _, entry in ipairs(queues_of_tenant(queue, slug)) do
    local waiting = of_others[entry.class]
    waiting[1] = waiting[1] - call('ZCARD', K.order .. entry.queue)
    waiting[2] = waiting[2] - total_cost(entry.queue)
  end
  return of_others
end

-- With fair sharing among several tenants the order is not fixed, as counters change with each claim. The estimate:
-- all tasks of better classes go first; in the same effective class each other tenant is served as many tokens as
-- this one has ahead of the task, and all tasks of a class have the same size.
local function ahead_by_fair_share(queue, slug, rule, accepted_us, own_tokens)
  local own = math.max(0, effective_class(rule, class_and_tenant(queue), accepted_us))
  local tasks, tokens = 0, 0
  local of_others = waiting_of_others(queue, slug)
  for class = 0, NUM_CLASSES - 1 do
    local num_tasks, num_tokens = unpack(of_others[class])
    if num_tasks > 0 then
      local before = num_tasks
      if class >= own then
        local at_once, in_turn = competing_queues(queue, slug, rule, class, own)
        before = at_once + in_turn * own_tokens / math.max(1, num_tokens / num_tasks)
      end
      before = math.min(before, num_tasks)
      tasks, tokens = tasks + before, tokens + num_tokens * before / num_tasks
    end
  end
  return math.floor(tasks + 0.5), math.floor(tokens + 0.5)
end

-- Without fair sharing tasks of other tenants go by age, which is taken to be evenly distributed.
local function ahead_by_arrival(queue, slug, rule, accepted_us)
  local own = effective_class(rule, class_and_tenant(queue), accepted_us)
  local tasks, tokens = 0, 0
  local of_others = waiting_of_others(queue, slug)
  for class = 0, NUM_CLASSES - 1 do
    local num_tasks, num_tokens = unpack(of_others[class])
    local head = tonumber(call('ZRANGE', K.heads .. slug .. ':' .. class, 0, 0, 'WITHSCORES')[2] or nil)
    if num_tasks > 0 and head then
      local last = math.max(accepted_until(rule, class, own - 1),
        math.min(accepted_until(rule, class, own), accepted_us))
      local part = class < own and 1 or (last - head) / math.max(1, now_us - head)
      part = math.max(0, math.min(1, part))
      tasks, tokens = tasks + num_tasks * part, tokens + num_tokens * part
    end
  end
  return math.floor(tasks + 0.5), math.floor(tokens + 0.5)
end

-- Tasks and tokens ahead of a waiting task, 0 only for the next to be claimed; nil if the task does not wait.
local function queue_position(queue, slug, id)
  local accepted_us = tonumber(call('ZSCORE', K.order .. queue, id) or nil)
  if not accepted_us then
    return nil
  end
  local rule = rule_of(slug)
  local tasks, tokens = ahead_within_tenant(queue, slug, rule, accepted_us)
  if not has_several_tenants(slug) then
    return tasks, tokens
  elseif call('ZRANGE', K.order .. queue, 0, 0)[1] == id and next_queue(slug) == queue then
    -- Even if ageing puts another task of the tenant first: every second claim ignores age.
    return 0, 0
  end
  local more_tasks, more_tokens
  if rule.fair then
    more_tasks, more_tokens = ahead_by_fair_share(queue, slug, rule, accepted_us, tokens)
  else
    more_tasks, more_tokens = ahead_by_arrival(queue, slug, rule, accepted_us)
  end
  return math.max(1, tasks + more_tasks), tokens + more_tokens
end
