-- Types of the keys that scripts write. A key of another type would end a script with an error between two of
-- its writes, so each script checks the keys that it is going to write before it writes the first of them.
-- An index of the wrong type is deleted and the damage is noted; `audit.lua` builds it again from the tasks.

-- How long the note of damage is kept if no audit follows.
local DAMAGE_MS = 86400000

local function note_damage(slug)
  call('SADD', K.damaged, slug)
  call('PEXPIRE', K.damaged, DAMAGE_MS)
end

local function ensure(slug, kind, ...)
  for _, key in ipairs({ ... }) do
    local found = call('TYPE', key).ok
    if found ~= kind and found ~= 'none' then
      call('DEL', key)
      note_damage(slug)
    end
  end
end

-- Indexes of a model, and those that all models share.
local function ensure_model(slug)
  ensure(slug, 'set', K.damaged, K.rq_queues)
  ensure(slug, 'zset', K.queues .. slug, K.shares .. slug, K.away .. slug, K.unserved .. slug, K.shown .. slug,
    K.deadlines .. slug, K.leases, K.watched, K.outbox_due)
  ensure(slug, 'hash', K.waiting .. slug, K.tenants .. slug, K.totals .. slug, K.pace .. slug, K.rule .. slug)
  ensure(slug, 'stream', K.outbox)
  ensure(slug, 'string', K.clock .. slug)
  for class = 0, tonumber(K.num_classes) - 1 do
    ensure(slug, 'zset', K.lines .. slug .. ':' .. class, K.heads .. slug .. ':' .. class)
  end
end

local function ensure_queue(slug, queue)
  ensure(slug, 'zset', K.order .. queue, K.rq_wip .. queue, K.rq_finished .. queue, K.rq_failed .. queue,
    K.rq_canceled .. queue)
  ensure(slug, 'hash', K.cost .. queue)
  ensure(slug, 'list', K.rq_queue .. queue)
end

-- What belongs to one task beside its run hash, which is read as empty if it is no hash.
local function ensure_task(slug, id)
  ensure(slug, 'stream', K.log .. id, K.rq_results .. id)
  ensure(slug, 'hash', K.rq_job .. id)
  ensure(slug, 'zset', K.rq_executions .. id, K.readers .. id)
end
