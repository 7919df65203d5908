-- How much goes before a waiting task, as things stand. Knows no owner; costs nothing for each line that waits.

-- Cost of the first `count` tasks of a queue. A little more if one among them was cancelled.
local function cost_of_first(queue, count)
  local total = tonumber(call('HGET', K.cost .. queue, ':total'))
  local at = call('ZRANGE', K.order .. queue, count, count)[1]
  if not at then
    return total
  end
  local cost, before = split_cost(call('HGET', K.cost .. queue, at))
  return math.min(before - before_of(queue, call('ZRANGE', K.order .. queue, 0, 0)[1]), total - cost)
end

-- Tasks and tokens of a lone tenant's other classes: exactly those that are claimed before.
local function before_in_classes(queue, slug, id)
  local tasks, tokens = 0, 0
  local accepted = tonumber(call('ZSCORE', K.order .. queue, id))
  local own = aged(class_and_tenant(queue), accepted)
  for _, line in ipairs(lines_of_tenant(queue, slug)) do
    local better = now_us - (line.class - own + 1) * AGEING_US
    local older = math.min(better + AGEING_US, accepted - 1)
    local last = line.class < own and '+inf' or whole(math.max(better, older))
    local count = line.queue ~= queue and call('ZCOUNT', K.order .. line.queue, '-inf', last) or 0
    if count > 0 then
      tasks, tokens = tasks + count, tokens + cost_of_first(line.queue, count)
    end
  end
  return tasks, tokens
end

-- Lines of a class that count as `class_or_better` or better, as they have aged.
local function num_aged(group, class, class_or_better)
  local since = now_us - (class - class_or_better) * AGEING_US
  return call('ZCOUNT', K.unserved .. group, '-inf', whole(since))
end

-- Of other lines of a class: how many tasks go before the head of this one, and how many lines take turns with it.
-- `own`: the class as which this line counts.
local function rivals(queue, slug, class, own)
  local group, own_class, tenant = slug .. ':' .. class, class_and_tenant(queue)
  if class > own then
    -- Each that has aged as well goes once, and is not old any more.
    return num_aged(group, class, own) - (class == own_class and 1 or 0), 0
  end
  local others = call('ZCARD', K.lines .. group)
  local served_less
  if class == own_class then
    others = others - 1
    served_less = call('ZRANK', K.lines .. group, member_of(call('ZSCORE', K.queues .. slug, queue), queue))
  else
    served_less = call('ZCOUNT', K.lines .. group, '-inf', '(' .. call('ZSCORE', K.shares .. slug, tenant))
  end
  return math.min(others, served_less + num_aged(group, class, own - 1)), others
end

-- Among several tenants the order is not known before it happens, as their counters move with each claim. It is
-- estimated: all of better classes goes before; of the own class each tenant gets as many tokens as this one
-- has before its task, and the tasks of a class are of one size.
local function before_among_tenants(queue, slug, rank, own_tokens)
  local own_class = class_and_tenant(queue)
  -- What is behind the head will be judged by its class: a line that was just served ages anew.
  local own = rank > 0 and own_class
    or aged(own_class, call('ZSCORE', K.unserved .. slug .. ':' .. own_class, queue))
  local tasks, tokens = 0, 0
  for class = 0, NUM_CLASSES - 1 do
    local num_tasks, num_tokens = waiting_in(slug, class)
    if class == own_class then
      num_tasks = num_tasks - call('ZCARD', K.order .. queue)
      num_tokens = num_tokens - call('HGET', K.cost .. queue, ':total')
    end
    if num_tasks > 0 then
      local before = num_tasks
      if class >= own then
        local at_once, in_turn = rivals(queue, slug, class, own)
        before = at_once + in_turn * own_tokens / math.max(1, num_tokens / num_tasks)
      end
      before = math.min(before, num_tasks)
      tasks, tokens = tasks + before, tokens + num_tokens * before / num_tasks
    end
  end
  return math.floor(tasks + 0.5), math.floor(tokens + 0.5)
end

-- Tasks and tokens before a waiting task; only the next to be claimed has no task before it. Nil if it does not wait.
local function standing(queue, slug, id)
  local rank = call('ZRANK', K.order .. queue, id)
  if not rank then
    return nil
  end
  local tokens = cost_of_first(queue, rank)
  if not is_contested(slug) then
    local more_tasks, more_tokens = before_in_classes(queue, slug, id)
    return rank + more_tasks, tokens + more_tokens
  elseif rank == 0 and next_queue(slug) == queue then
    return 0, 0
  end
  local more_tasks, more_tokens = before_among_tenants(queue, slug, rank, tokens)
  return math.max(1, rank + more_tasks), tokens + more_tokens
end
