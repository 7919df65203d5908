-- Whose turn it is. A line is a queue in which something waits: one class of one tenant. Of a class that tenant
-- goes first which was served the fewest tokens; a line that nobody serves rises by a class each minute. After
-- "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024): virtual token counters. Knows no task but
-- by the time of its acceptance. Nothing here costs anything for each line that waits.

local AGEING_US = 60000000
-- What tenants were served is forgotten when none of them has left a line for so long.
local AWAY_MS = 3600000
-- And of so many at most it is remembered.
local MOST_AWAY = 10000
local NUM_CLASSES = tonumber(K.num_classes)

local function class_and_tenant(queue)
  local class, tenant = string.match(queue, ':(%d+):([^:]*)$')
  return tonumber(class), tenant
end

-- Of equal counters the oldest head goes first: members of one score stand in order of their text.
local function member_of(head, queue)
  return string.format('%020.0f', head) .. queue
end

local function queue_of(member)
  return string.sub(member, 21)
end

-- More than one tenant waits.
local function is_contested(slug)
  return call('ZCARD', K.shares .. slug) > 1
end

-- The least counter of those who wait, or else of who waited last.
local function least_counter(slug)
  return tonumber(call('ZRANGE', K.shares .. slug, 0, 0, 'WITHSCORES')[2]
    or call('ZSCORE', K.away .. slug, ':last') or 0)
end

-- A tenant has something in line again. What it did not ask for while it was away is not owed to it.
local function join(slug, tenant)
  local away, least = K.away .. slug, least_counter(slug)
  local counter = whole(math.max(least, tonumber(call('ZSCORE', away, tenant) or 0)))
  call('ZADD', K.shares .. slug, counter, tenant)
  -- Those below would be lifted too, so there is nothing to remember of them.
  call('ZREM', away, tenant)
  call('ZREMRANGEBYSCORE', away, '-inf', whole(least))
  return counter
end

local function part(slug, tenant)
  local counter = call('ZSCORE', K.shares .. slug, tenant)
  call('ZREM', K.shares .. slug, tenant)
  -- Who was served the least loses the least by being forgotten.
  call('ZREMRANGEBYRANK', K.away .. slug, 0, -MOST_AWAY)
  call('ZADD', K.away .. slug, counter, tenant, counter, ':last')
  call('PEXPIRE', K.away .. slug, AWAY_MS)
end

-- The lines of a queue's tenant: queue, class, acceptance of the head.
local function lines_of_tenant(queue, slug)
  local lines = {}
  for class = 0, NUM_CLASSES - 1 do
    local name = string.gsub(queue, ':%d+:([^:]*)$', ':' .. class .. ':%1')
    local head = call('ZSCORE', K.queues .. slug, name)
    if head then
      lines[#lines + 1] = { queue = name, class = class, head = head }
    end
  end
  return lines
end

local function close_line(queue, slug, group, tenant)
  call('ZREM', K.queues .. slug, queue)
  call('ZREM', K.unserved .. group, queue)
  if #lines_of_tenant(queue, slug) == 0 then
    part(slug, tenant)
  end
end

-- To be called after each change of an order: its line has the place that its head gives it.
local function line_up(queue, slug)
  local head = call('ZRANGE', K.order .. queue, 0, 0, 'WITHSCORES')[2]
  local was = call('ZSCORE', K.queues .. slug, queue) or nil
  if head == was then
    return
  end
  local class, tenant = class_and_tenant(queue)
  local group = slug .. ':' .. class
  if was then
    call('ZREM', K.lines .. group, member_of(was, queue))
  end
  if not head then
    return close_line(queue, slug, group, tenant)
  end
  local since = call('ZSCORE', K.unserved .. group, queue)
  local served_at = since and tonumber(since) > tonumber(was) and since or 0
  call('ZADD', K.queues .. slug, head, queue)
  call('ZADD', K.unserved .. group, whole(math.max(head, served_at)), queue)
  local counter = call('ZSCORE', K.shares .. slug, tenant) or join(slug, tenant)
  call('ZADD', K.lines .. group, counter, member_of(head, queue))
end

-- `num_tokens` more, or fewer, were served to a queue's tenant.
local function charge(queue, slug, num_tokens)
  local _, tenant = class_and_tenant(queue)
  local share = call('ZSCORE', K.shares .. slug, tenant)
  local counter = share or call('ZSCORE', K.away .. slug, tenant) or least_counter(slug)
  counter = whole(math.max(0, counter + num_tokens))
  if share then
    call('ZADD', K.shares .. slug, counter, tenant)
    for _, line in ipairs(lines_of_tenant(queue, slug)) do
      call('ZADD', K.lines .. slug .. ':' .. line.class, counter, member_of(line.head, line.queue))
    end
  else
    call('ZADD', K.away .. slug, counter, tenant)
    call('PEXPIRE', K.away .. slug, AWAY_MS)
  end
end

-- A task of this queue was taken from it. Its cost is charged until its owner is done; see let_go.
local function serve(queue, slug, cost)
  call('ZADD', K.unserved .. slug .. ':' .. class_and_tenant(queue), 'XX', whole(now_us), queue)
  charge(queue, slug, cost)
end

-- The class as which a line counts that nobody has served since then. There is no best one: who has waited
-- long enough goes before all who have not.
local function aged(class, since)
  return class - math.max(0, math.floor((now_us - since) / AGEING_US))
end

-- Of one class the line that goes first; nil if none waits. The lines of a lone tenant age by their heads: its
-- tasks go by acceptance, those of a class a minute later than those of the class before.
local function first_of_class(slug, class, contested)
  local group = slug .. ':' .. class
  local queue, since = unpack(call('ZRANGE', K.unserved .. group, 0, 0, 'WITHSCORES'))
  if not queue then
    return nil
  elseif contested then
    local least_served = queue_of(call('ZRANGE', K.lines .. group, 0, 0)[1])
    if aged(class, call('ZSCORE', K.unserved .. group, least_served)) == aged(class, since) then
      queue = least_served
    end
  else
    since = call('ZSCORE', K.queues .. slug, queue)
  end
  local _, tenant = class_and_tenant(queue)
  return { queue = queue, class = aged(class, since), head = tonumber(call('ZSCORE', K.queues .. slug, queue)),
    counter = tonumber(call('ZSCORE', K.shares .. slug, tenant)) }
end

local function goes_before(a, b)
  if a.class ~= b.class then
    return a.class < b.class
  elseif a.counter ~= b.counter then
    return a.counter < b.counter
  end
  return a.head < b.head
end

-- The queue whose head is claimed next; nil if nothing waits.
local function next_queue(slug)
  local first, contested = nil, is_contested(slug)
  for class = 0, NUM_CLASSES - 1 do
    local line = first_of_class(slug, class, contested)
    if line and (not first or goes_before(line, first)) then
      first = line
    end
  end
  return first and first.queue
end
