-- Stores and queues a task, or stores nothing. ARGV: retention, id, digest of the body, limit of waiting tasks or '',
-- limit of their tokens or '', '1' to share the limits among tenants, number of fields of the run hash, their names
-- and values, names and values of RQ's job. Returns {'submitted' | 'replayed', id}, {'conflict'} or {'full', 'tasks'
-- | 'tokens', waiting tasks, their tokens, 'all' | 'tenant', the tenant's waiting tasks, their tokens}: the limit
-- that was met, and whose.

local id, digest = ARGV[2], ARGV[3]
local limit, token_limit = tonumber(ARGV[4]) or math.huge, tonumber(ARGV[5]) or math.huge
local is_shared = ARGV[6] == '1'
local first_field, first_job_field = 8, 8 + 2 * ARGV[7]
local task = {}
for i = first_field, first_job_field - 1, 2 do
  task[ARGV[i]] = ARGV[i + 1]
end
local queue, slug, cost, record = task.queue, task.slug, task.cost, task.idempotency

ensure_model_keys(slug)
ensure_queue_keys(slug, queue)
if record then
  ensure_type(slug, 'string', record)
  local kept_digest, kept_id = string.match(call('GET', record) or '', '^(.*):([^:]+)$')
  if kept_id and call('EXISTS', K.run .. kept_id) == 1 then
    return kept_digest == digest and { 'replayed', kept_id } or { 'conflict' }
  end
end

-- The same submission again, because its reply was lost.
if call('EXISTS', K.run .. id) == 1 then
  return { 'replayed', id }
end

local waiting, tokens = waiting_of_model(slug)
local own_waiting, own_tokens = waiting_of_tenant(slug, queue)
local function full(limit_met, whose)
  return { 'full', limit_met, waiting, whole(tokens), whose, own_waiting, whole(own_tokens) }
end

-- With shared limits a tenant may use no more than all tenants together leave free: a single tenant takes at most half
-- of the limit, so others find room. The first waiting task of a tenant (without sharing: of the model) is accepted at
-- any size; otherwise a large task would never be accepted.
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
task.accepted_us = accepted_us
call('HSET', K.run .. id, 'accepted_us', accepted_us, unpack(ARGV, first_field, first_job_field - 1))
if record then
  call('SET', record, digest .. ':' .. id)
end
call('HSET', K.rq_job .. id, unpack(ARGV, first_job_field))
call('HSET', K.rq_job .. id, 'status', 'queued', 'origin', queue,
  'created_at', utcformat(now_us), 'enqueued_at', utcformat(now_us))
call('HINCRBY', K.totals .. slug, 'submitted', 1)
list_task(id, queue, accepted_us)
enqueue(id, task)
return { 'submitted', id }
