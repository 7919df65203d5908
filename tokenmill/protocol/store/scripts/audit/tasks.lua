-- Restores missing index entries of tasks from their run hashes. ARGV: retention, lease in seconds for a claimed task
-- without one, '1' if the outbox was missing, ids. Returns {number of tasks repaired, slugs of the tasks that have
-- not ended}.

local lease_us, is_outbox_lost = ARGV[2] * 1000000, ARGV[3] == '1'
local num_repaired, slugs, ensured = 0, {}, {}

local function ensure_once(slug, queue)
  if not ensured[slug] then
    ensured[slug] = true
    ensure_model_keys(slug)
  end
  if not ensured[queue] then
    ensured[queue] = true
    ensure_queue_keys(slug, queue)
  end
end

local function repaired(slug)
  num_repaired = num_repaired + 1
  mark_damaged(slug)
end

local function audit_waiting(id)
  local task = hash(K.run .. id)
  local slug, queue = task.slug, task.queue
  if not call('ZSCORE', K.order .. queue, id) and tonumber(task.accepted_us) then
    call('LREM', K.rq_queue .. queue, 0, id)
    enqueue(id, task)
    repaired(slug)
  elseif not call('ZSCORE', K.shown .. slug, queue) then
    call('ZADD', K.shown .. slug, next_tidying(now_us), queue)
    call('SADD', K.rq_queues, K.rq_queue .. queue)
    repaired(slug)
  elseif first_limit(task) and not call('ZSCORE', K.deadlines .. slug, id) then
    add_deadline(slug, id, task)
    num_repaired = num_repaired + 1
  end
end

local function audit_listed(id, slug, queue, accepted_us, terminal)
  ensure_once(slug, queue)
  if tonumber(accepted_us) and not call('ZSCORE', K.tasks .. tenant_of(queue), id) then
    list_task(id, queue, accepted_us)
    num_repaired = num_repaired + 1
  end
  local left_ms = terminal and call('PTTL', K.run .. id) or -1
  if left_ms > 0 and not call('ZSCORE', K.ended, tenant_of(queue) .. ':' .. id) then
    unlist_later(id, queue, now_us + left_ms * 1000)
    num_repaired = num_repaired + 1
  end
end

for i = 4, #ARGV do
  local id = ARGV[i]
  local kept = redis.pcall('HMGET', K.run .. id, 'slug', 'queue', 'terminal', 'owner', 'webhook', 'accepted_us')
  local slug, queue, terminal, owner, webhook, accepted_us = unpack(kept.err and {} or kept)
  if slug and queue then
    audit_listed(id, slug, queue, accepted_us, terminal)
  end
  if slug and queue and not terminal then
    ensure_once(slug, queue)
    slugs[slug] = true
    if not owner then
      audit_waiting(id)
    elseif not call('ZSCORE', K.leases, id) then
      call('ZADD', K.leases, seconds(now_us + lease_us), id)
      num_repaired = num_repaired + 1
    end
  elseif slug and queue and webhook and is_outbox_lost then
    ensure_once(slug, queue)
    if not call('ZSCORE', K.outbox_due, id) then
      add_to_outbox(id)
      num_repaired = num_repaired + 1
    end
  end
end

local names = {}
for slug in pairs(slugs) do
  names[#names + 1] = slug
end
return { num_repaired, names }
