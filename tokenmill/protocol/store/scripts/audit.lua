-- Puts tasks back into the indexes in which they are missing: the run hashes say what must be there.
-- ARGV: retention, seconds of the lease that a claimed task without one gets, '1' if there was no outbox before
-- the audit, ids. Gives {number of tasks that were put back, slugs of the tasks that have not ended}.

local lease_us, is_outbox_lost = ARGV[2] * 1000000, ARGV[3] == '1'
local num_mended, slugs, ensured = 0, {}, {}

local function ensure_once(slug, queue)
  if not ensured[slug] then
    ensured[slug] = true
    ensure_model(slug)
  end
  if not ensured[queue] then
    ensured[queue] = true
    ensure_queue(slug, queue)
  end
end

local function mended(slug)
  num_mended = num_mended + 1
  note_damage(slug)
end

local function audit_waiting(id)
  local task = hash(K.run .. id)
  local slug, queue = task.slug, task.queue
  if not call('ZSCORE', K.order .. queue, id) and task.accepted_us then
    call('LREM', K.rq_queue .. queue, 0, id)
    enter(id, task)
    mended(slug)
  elseif not call('ZSCORE', K.shown .. slug, queue) then
    call('ZADD', K.shown .. slug, tidy_at(now_us), queue)
    call('SADD', K.rq_queues, K.rq_queue .. queue)
    mended(slug)
  elseif first_limit(task) and not call('ZSCORE', K.deadlines .. slug, id) then
    watch(slug, id, task)
    num_mended = num_mended + 1
  end
end

for i = 4, #ARGV do
  local id = ARGV[i]
  local kept = redis.pcall('HMGET', K.run .. id, 'slug', 'queue', 'terminal', 'owner', 'webhook')
  local slug, queue, terminal, owner, webhook = unpack(kept.err and {} or kept)
  if slug and queue and not terminal then
    ensure_once(slug, queue)
    slugs[slug] = true
    if not owner then
      audit_waiting(id)
    elseif not call('ZSCORE', K.leases, id) then
      call('ZADD', K.leases, seconds(now_us + lease_us), id)
      num_mended = num_mended + 1
    end
  elseif slug and queue and webhook and is_outbox_lost then
    ensure_once(slug, queue)
    if not call('ZSCORE', K.outbox_due, id) then
      put_out(id)
      num_mended = num_mended + 1
    end
  end
end

local names = {}
for slug in pairs(slugs) do
  names[#names + 1] = slug
end
return { num_mended, names }
