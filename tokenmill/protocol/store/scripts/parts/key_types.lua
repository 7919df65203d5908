-- Checks the types of the keys that a script writes. A key of another type would raise an error between two writes,
-- so each script checks all its keys before its first write. An index of the wrong type is deleted and its model
-- marked as damaged; the audit rebuilds it from the run hashes.

-- How long the mark is kept if no audit follows.
local DAMAGE_MS = 86400000

local function mark_damaged(slug)
  call('SADD', K.damaged, slug)
  call('PEXPIRE', K.damaged, DAMAGE_MS)
end

local function ensure_type(slug, kind, ...)
  for _, key in ipairs({ ... }) do
    local found = call('TYPE', key).ok
    if found ~= kind and found ~= 'none' then
      call('DEL', key)
      mark_damaged(slug)
    end
  end
end

-- Indexes of a model, and those of all models.
local function ensure_model_keys(slug)
  ensure_type(slug, 'set', K.damaged, K.rq_queues)
  ensure_type(slug, 'zset', K.queues .. slug, K.shares .. slug, K.away .. slug, K.unserved .. slug, K.shown .. slug,
    K.deadlines .. slug, K.leases, K.watched, K.outbox_due, K.ended)
  ensure_type(slug, 'hash', K.waiting .. slug, K.tenants .. slug, K.totals .. slug, K.pace .. slug, K.rule .. slug)
  ensure_type(slug, 'stream', K.outbox)
  ensure_type(slug, 'string', K.clock .. slug)
  for class = 0, tonumber(K.num_classes) - 1 do
    ensure_type(slug, 'zset', K.lines .. slug .. ':' .. class, K.heads .. slug .. ':' .. class)
  end
end

local function ensure_queue_keys(slug, queue)
  ensure_type(slug, 'zset', K.tasks .. string.match(queue, '([^:]*)$'), K.order .. queue, K.rq_wip .. queue, K.rq_finished .. queue, K.rq_failed .. queue,
    K.rq_canceled .. queue)
  ensure_type(slug, 'hash', K.cost .. queue)
  ensure_type(slug, 'list', K.rq_queue .. queue)
end

-- Keys of one task. The run hash is missing here: one of another type is read as empty.
local function ensure_task_keys(slug, id)
  ensure_type(slug, 'stream', K.log .. id, K.rq_results .. id)
  ensure_type(slug, 'hash', K.rq_job .. id)
  ensure_type(slug, 'zset', K.rq_executions .. id, K.readers .. id)
end
