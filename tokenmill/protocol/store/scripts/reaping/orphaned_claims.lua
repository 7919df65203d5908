-- Finds claims and workers that would never lapse, because keys were deleted or Redis's clock was set back. A claimed
-- task without a lease, or with a lease longer than a renewal now would set, gets a new one, which a live owner
-- renews. A claim whose run hash is missing or names another owner is removed. ARGV: retention, slug, maximum number of
-- claims to check; the position is stored for the next call. Returns {ids lost}, {id, reason of each failure}.

local slug, limit = ARGV[2], tonumber(ARGV[3])
local lost = {}
-- For claims of older versions, which stored no duration.
local LEASE_SECONDS = 60
-- Tolerance for a clock that was set back.
local SLACK_US = 1000000

local function check_claim(queue, composite)
  local id, owner = string.match(composite, '^(.*):([^:]*)$')
  local run = hash(K.run .. id)
  if run.owner == owner then
    local latest = now_us + (tonumber(run.lease_seconds) or LEASE_SECONDS) * 1000000
    local lapses = call('ZSCORE', K.leases, id)
    if (not lapses or lapses * 1000000 > latest + SLACK_US) and not is_set_aside(id) then
      call('ZADD', K.leases, seconds(latest), id)
    end
    return
  end
  drop_execution(queue, id, composite)
  if not run.slug then
    finish_without_run_hash(id, queue)
    lost[#lost + 1] = id
  end
end

-- The queues of a model from `first` on, in order.
local function queues_from(first)
  local queues, later = call('ZRANGE', K.shown .. slug, 0, -1), {}
  table.sort(queues)
  for nth, queue in ipairs(queues) do
    if queue >= first then
      for i = nth, #queues do
        later[#later + 1] = queues[i]
      end
      return later
    end
  end
  return later
end

local function sweep()
  local kept = call('GET', K.sweep .. slug) or ''
  local from, after = string.match(kept, '^(%S*) (.*)$')
  local left = limit
  for _, queue in ipairs(queues_from(from or '')) do
    local min = queue == from and after ~= '' and '(' .. after or '-'
    local claims = call('ZRANGEBYLEX', K.rq_wip .. queue, min, '+', 'LIMIT', 0, left)
    for _, composite in ipairs(claims) do
      protect(composite, check_claim, queue, composite)
    end
    left = left - #claims
    if left == 0 then
      return call('SET', K.sweep .. slug, queue .. ' ' .. claims[#claims], 'PX', retention_ms)
    end
  end
  call('DEL', K.sweep .. slug)
end

local function check_worker(name)
  if not valid_record(name) then
    call('ZREM', K.workers, name)
    call('ZREM', K.ready .. slug, name)
    call('DEL', K.worker .. name)
  end
end

protect('the claimed tasks', sweep)
for _, name in ipairs(call('ZRANGE', K.ready .. slug, 0, limit)) do
  protect(name, check_worker, name)
end
for _, name in ipairs(call('ZRANGE', K.workers, 0, limit)) do
  protect(name, check_worker, name)
end
return { lost, failures }
