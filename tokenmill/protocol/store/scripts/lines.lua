-- Whose turn it is. A line is a queue in which something waits: one class of one tenant, oldest task first.
-- Which line goes first is decided in `turns.lua`.
-- Tokens served are virtual counters after "Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024).
-- Knows no task but by the time of its acceptance.

-- A tenant's counter is forgotten when no tenant has left a line for this long.
local AWAY_MS = 3600000
-- At most this number of counters of tenants that do not wait is kept.
local MOST_AWAY = 10000
local NUM_CLASSES = tonumber(K.num_classes)

local function class_and_tenant(queue)
  local class, tenant = string.match(queue, ':(%d+):([^:]*)$')
  return tonumber(class), tenant
end

-- Members of one score stand in order of their text, so that of equal counters the oldest head goes first.
local function member_of(head, queue)
  return string.format('%020.0f', head) .. queue
end

local function head_and_queue(member)
  return tonumber(string.sub(member, 1, 20)), string.sub(member, 21)
end

-- More than one tenant waits.
local function is_contested(slug)
  return call('ZCARD', K.shares .. slug) > 1
end

-- The least counter of the tenants that wait, or else of the last that waited.
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
  if not counter then
    return
  end
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
      lines[#lines + 1] = { queue = name, class = class, head = tonumber(head) }
    end
  end
  return lines
end

local function close_line(queue, slug, group, tenant)
  call('ZREM', K.queues .. slug, queue)
  call('ZREM', K.unserved .. slug, queue)
  call('ZREM', K.heads .. group, queue)
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
  local since = call('ZSCORE', K.unserved .. slug, queue)
  local served_at = was and since and tonumber(since) > tonumber(was) and since or 0
  call('ZADD', K.queues .. slug, head, queue)
  call('ZADD', K.heads .. group, head, queue)
  call('ZADD', K.unserved .. slug, whole(math.max(head, served_at)), queue)
  local counter = call('ZSCORE', K.shares .. slug, tenant) or join(slug, tenant)
  call('ZADD', K.lines .. group, counter, member_of(head, queue))
end

-- Whether the indexes have a line where its first task puts it.
local function is_lined_up(queue, slug)
  local head = call('ZRANGE', K.order .. queue, 0, 0, 'WITHSCORES')[2]
  local class, tenant = class_and_tenant(queue)
  local group = slug .. ':' .. class
  return head and head == call('ZSCORE', K.queues .. slug, queue) and head == call('ZSCORE', K.heads .. group, queue)
    and call('ZSCORE', K.unserved .. slug, queue) and call('ZSCORE', K.shares .. slug, tenant)
    and call('ZSCORE', K.lines .. group, member_of(head, queue))
end

-- Builds the indexes of a model's lines again. The tenants keep the counters that are still there.
local function line_up_again(slug)
  call('DEL', K.queues .. slug, K.unserved .. slug)
  for class = 0, NUM_CLASSES - 1 do
    call('DEL', K.lines .. slug .. ':' .. class, K.heads .. slug .. ':' .. class)
  end
  local waits = {}
  for _, queue in ipairs(call('ZRANGE', K.shown .. slug, 0, -1)) do
    local _, tenant = class_and_tenant(queue)
    if tenant and call('EXISTS', K.order .. queue) == 1 then
      waits[tenant] = true
      line_up(queue, slug)
    end
  end
  for _, tenant in ipairs(call('ZRANGE', K.shares .. slug, 0, -1)) do
    if not waits[tenant] then
      part(slug, tenant)
    end
  end
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
  call('ZADD', K.unserved .. slug, 'XX', whole(now_us), queue)
  charge(queue, slug, cost)
end
