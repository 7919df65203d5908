-- Stores a task and queues it; or says why not, and then has stored nothing.
-- ARGV: retention, id, queue, slug, model, priority, tenant, cost, metadata, key of the idempotency record or
-- '', digest of the body, limit of waiting tasks or '', limit of their tokens or '', number of outputs,
-- seconds or '' of each of its own limits (queue, first token, end), URL of its webhook or '', 'cancel' if it
-- ends with its last reader or '', fields and values of RQ's job.
-- Gives {'submitted' | 'replayed', id}, {'conflict'} or {'full', 'tasks' | 'tokens',
-- waiting tasks, their tokens}: which limit was met.

local id, queue, slug, cost = ARGV[2], ARGV[3], ARGV[4], ARGV[8]
local record, digest = ARGV[10], ARGV[11]
local limit, token_limit = tonumber(ARGV[12]) or math.huge, tonumber(ARGV[13]) or math.huge

if record ~= '' then
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
if waiting >= limit then
  return { 'full', 'tasks', waiting, whole(tokens) }
-- A task that is larger than the limit is taken when it is alone, or it never would be.
elseif waiting > 0 and tokens + cost > token_limit then
  return { 'full', 'tokens', waiting, whole(tokens) }
end

local accepted_us = whole(math.max(now_us, tonumber(call('GET', K.clock .. slug) or 0) + 1))
call('SET', K.clock .. slug, accepted_us)
local task = { queue = queue, slug = slug, model = ARGV[5], priority = ARGV[6], tenant = ARGV[7], cost = cost,
  metadata = ARGV[9], accepted_us = accepted_us, n = ARGV[14], queue_timeout_seconds = ARGV[15],
  ttft_timeout_seconds = ARGV[16], timeout_seconds = ARGV[17], idempotency = record,
  webhook = ARGV[18], on_disconnect = ARGV[19] }
for name, value in pairs(task) do
  if value ~= '' then
    call('HSET', K.run .. id, name, value)
  end
end
if record ~= '' then
  call('SET', record, digest .. ':' .. id)
end
call('HSET', K.rq_job .. id, unpack(ARGV, 20))
call('HSET', K.rq_job .. id, 'status', 'queued', 'origin', queue,
  'created_at', utcformat(now_us), 'enqueued_at', utcformat(now_us))
call('HINCRBY', K.totals .. slug, 'submitted', 1)
enter(id, task)
return { 'submitted', id }
