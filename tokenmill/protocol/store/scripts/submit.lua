-- Stores a task and queues it; or says why not, and then has stored nothing.
-- ARGV: retention, id, queue, slug, model, priority, tenant, cost, metadata, key of the idempotency record or
-- '', digest of the body, limit of waiting tasks or '', limit of their tokens or '', '1' if no tenant may take
-- all of these limits or '', number of outputs,
-- seconds or '' of each of its own limits (queue, first token, end), URL of its webhook or '', 'cancel' if it
-- ends with its last reader or '', fields and values of RQ's job.
-- Gives {'submitted' | 'replayed', id}, {'conflict'} or {'full', 'tasks' | 'tokens', waiting tasks, their tokens,
-- 'all' | 'tenant', the tenant's waiting tasks, their tokens}: which limit was met, and whose.

local id, queue, slug, cost = ARGV[2], ARGV[3], ARGV[4], ARGV[8]
local record, digest = ARGV[10], ARGV[11]
local limit, token_limit = tonumber(ARGV[12]) or math.huge, tonumber(ARGV[13]) or math.huge
local is_shared = ARGV[14] == '1'

ensure_model(slug)
ensure_queue(slug, queue)
if record ~= '' then
  ensure(slug, 'string', record)
  local kept_digest, kept_id = string.match(call('GET', record) or '', '^(.*):([^:]+)$')
  if kept_id and call('EXISTS', K.run .. kept_id) == 1 then
    return kept_digest == digest and { 'replayed', kept_id } or { 'conflict' }
  end
end

-- The same submission again: the reply was lost.
if call('EXISTS', K.run .. id) == 1 then
  return { 'replayed', id }
end

local waiting, tokens = all_waiting(slug)
local own_waiting, own_tokens = waiting_of_tenant(slug, queue)
local function full(limit_met, whose)
  return { 'full', limit_met, waiting, whole(tokens), whose, own_waiting, whole(own_tokens) }
end

-- A tenant may have as much as it leaves free: alone it takes half, and each that comes finds room. The first task
-- of a tenant (without such shares: the first of all) is taken whatever its size, or a large one never would be.
if waiting >= limit then
  return full('tasks', 'all')
elseif is_shared and own_waiting >= limit - waiting then
  return full('tasks', 'tenant')
elseif is_shared and own_waiting > 0 and own_tokens + cost > token_limit - tokens then
  return full('tokens', tokens + cost > token_limit and 'all' or 'tenant')
elseif not is_shared and waiting > 0 and tokens + cost > token_limit then
  return full('tokens', 'all')
end

local accepted_us = whole(math.max(now_us, tonumber(call('GET', K.clock .. slug) or 0) + 1))
call('SET', K.clock .. slug, accepted_us)
local task = { queue = queue, slug = slug, model = ARGV[5], priority = ARGV[6], tenant = ARGV[7], cost = cost,
  metadata = ARGV[9], accepted_us = accepted_us, n = ARGV[15], queue_timeout_seconds = ARGV[16],
  ttft_timeout_seconds = ARGV[17], timeout_seconds = ARGV[18], idempotency = record,
  webhook = ARGV[19], on_disconnect = ARGV[20] }
for name, value in pairs(task) do
  if value ~= '' then
    call('HSET', K.run .. id, name, value)
  end
end
if record ~= '' then
  call('SET', record, digest .. ':' .. id)
end
call('HSET', K.rq_job .. id, unpack(ARGV, 21))
call('HSET', K.rq_job .. id, 'status', 'queued', 'origin', queue,
  'created_at', utcformat(now_us), 'enqueued_at', utcformat(now_us))
call('HINCRBY', K.totals .. slug, 'submitted', 1)
enter(id, task)
return { 'submitted', id }
