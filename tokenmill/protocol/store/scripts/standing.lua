-- How much goes before a waiting task, as things stand. Knows no owner; costs nothing for each line that waits.

-- Tasks and tokens of the same tenant that are claimed before a task: exact.
local function before_of_tenant(queue, slug, rule, accepted_us)
  local counts_as = aged(rule, class_and_tenant(queue), accepted_us)
  local tasks, tokens = 0, 0
  for _, line in ipairs(lines_of_tenant(queue, slug)) do
    local better = aged_until(rule, line.class, counts_as - 1)
    local equal = math.min(aged_until(rule, line.class, counts_as), accepted_us - 1)
    local last = math.max(better, equal)
    if last == math.huge then
      tasks, tokens = tasks + call('ZCARD', K.order .. line.queue), tokens + total_cost(line.queue)
    elseif last >= line.head then
      tasks = tasks + call('ZCOUNT', K.order .. line.queue, '-inf', whole(last))
      tokens = tokens + cost_before(line.queue, last + 1)
    end
  end
  return tasks, tokens
end

-- Of the lines of other tenants in a class: how many tasks go before the head of this one, and how many lines take
-- turns with it. `own`: the class as which the task counts.
local function rivals(queue, slug, rule, class, own)
  local group, own_class, tenant = slug .. ':' .. class, class_and_tenant(queue)
  local num_lines = call('ZCARD', K.lines .. group) - (class == own_class and 1 or 0)
  local equal = num_lines
  if class > own then
    equal = call('ZCOUNT', K.heads .. group, '-inf', whole(aged_until(rule, class, own)))
    equal = math.min(num_lines, math.max(0, equal - (class == own_class and 1 or 0)))
  end
  local older = call('ZCOUNT', K.heads .. group, '-inf', whole(aged_until(rule, class, own - 1)))
  local counter = call('ZSCORE', K.shares .. slug, tenant)
  local less = counter and call('ZCOUNT', K.lines .. group, '-inf', '(' .. counter) or 0
  return math.min(equal, less + older), equal
end

-- Class -> { tasks, tokens } that wait of other tenants than that of a queue.
local function waiting_of_others(queue, slug)
  local of_others = {}
  for class = 0, NUM_CLASSES - 1 do
    of_others[class] = { waiting_in(slug, class) }
  end
  for _, line in ipairs(lines_of_tenant(queue, slug)) do
    local waiting = of_others[line.class]
    waiting[1] = waiting[1] - call('ZCARD', K.order .. line.queue)
    waiting[2] = waiting[2] - total_cost(line.queue)
  end
  return of_others
end

-- Among several tenants the order is not known before it happens, as their counters move with each claim. It is
-- estimated: all of better classes goes before; of the class as which the task counts each other tenant gets as
-- many tokens as this one has before its task, and the tasks of a class are of one size.
local function before_among_tenants(queue, slug, rule, accepted_us, own_tokens)
  local own = math.max(0, aged(rule, class_and_tenant(queue), accepted_us))
  local tasks, tokens = 0, 0
  local of_others = waiting_of_others(queue, slug)
  for class = 0, NUM_CLASSES - 1 do
    local num_tasks, num_tokens = unpack(of_others[class])
    if num_tasks > 0 then
      local before = num_tasks
      if class >= own then
        local at_once, in_turn = rivals(queue, slug, rule, class, own)
        before = at_once + in_turn * own_tokens / math.max(1, num_tokens / num_tasks)
      end
      before = math.min(before, num_tasks)
      tasks, tokens = tasks + before, tokens + num_tokens * before / num_tasks
    end
  end
  return math.floor(tasks + 0.5), math.floor(tokens + 0.5)
end

-- Without fair sharing the tasks of other tenants in a class go by their age. It is taken to be spread evenly.
local function before_by_arrival(queue, slug, rule, accepted_us)
  local own = aged(rule, class_and_tenant(queue), accepted_us)
  local tasks, tokens = 0, 0
  local of_others = waiting_of_others(queue, slug)
  for class = 0, NUM_CLASSES - 1 do
    local num_tasks, num_tokens = unpack(of_others[class])
    local head = tonumber(call('ZRANGE', K.heads .. slug .. ':' .. class, 0, 0, 'WITHSCORES')[2] or nil)
    if num_tasks > 0 and head then
      local last = math.max(aged_until(rule, class, own - 1), math.min(aged_until(rule, class, own), accepted_us))
      local part = class < own and 1 or (last - head) / math.max(1, now_us - head)
      part = math.max(0, math.min(1, part))
      tasks, tokens = tasks + num_tasks * part, tokens + num_tokens * part
    end
  end
  return math.floor(tasks + 0.5), math.floor(tokens + 0.5)
end

-- Tasks and tokens before a waiting task; only the next to be claimed has no task before it. Nil if it does not wait.
local function standing(queue, slug, id)
  local accepted_us = tonumber(call('ZSCORE', K.order .. queue, id) or nil)
  if not accepted_us then
    return nil
  end
  local rule = rule_of(slug)
  local tasks, tokens = before_of_tenant(queue, slug, rule, accepted_us)
  if not is_contested(slug) then
    return tasks, tokens
  elseif call('ZRANGE', K.order .. queue, 0, 0)[1] == id and next_queue(slug) == queue then
    -- Also where age puts another task of its tenant before it: every second claim goes by class and tokens.
    return 0, 0
  end
  local more_tasks, more_tokens
  if rule.fair then
    more_tasks, more_tokens = before_among_tenants(queue, slug, rule, accepted_us, tokens)
  else
    more_tasks, more_tokens = before_by_arrival(queue, slug, rule, accepted_us)
  end
  return math.max(1, tasks + more_tasks), tokens + more_tokens
end
