-- Takes back claimed tasks whose lease has lapsed.
-- ARGV: retention, number of tasks to treat at most (no other client is served meanwhile; 0 takes nothing back and
-- only stores the outage), seconds since Redis last failed the caller or '', JSON of the error `poison`, RQ's exception of it, type of RQ's result.
-- Returns {ids put back}, {ids cancelled}, {ids that ended as poison}, {ids lost}, {id, reason of each failure}.

local limit, failed_ago = tonumber(ARGV[2]), tonumber(ARGV[3])
local poison = { error_json = ARGV[4], exc_string = ARGV[5], result_type = ARGV[6] }
local returned, cancelled, poisoned, lost = {}, {}, {}, {}
-- An outage explains the silence of an owner that was heard within this time before it.
local OUTAGE_SECONDS = 86400

-- Since when this server has run, at the latest; 0 where that is not known.
local function started_us()
  local known, info = pcall(call, 'INFO', 'server')
  local uptime = known and tonumber(string.match(info, 'uptime_in_seconds:(%d+)'))
  return uptime and now_us - (uptime + 1) * 1000000 or 0
end

-- When Redis last was away: it failed a caller then, or has started since.
local function outage_us()
  local kept = tonumber(call('GET', K.outage) or 0) * 1000000
  return math.max(kept <= now_us and kept or 0, started_us())
end

-- Without a sign of life since an outage of Redis, the owner may have stopped in order, but could not say so.
local function is_excused(id, task, outage)
  local heard = (call('ZSCORE', K.leases, id) - (tonumber(task.lease_seconds) or 0)) * 1000000
  return heard < outage and heard > outage - OUTAGE_SECONDS * 1000000
end

local function take_back(id, outage)
  local task = hash(K.run .. id)
  if not task.owner then
    call('ZREM', K.leases, id)
  elseif not is_complete(task) then
    if task.queue then
      drop_execution(task.queue, id, id .. ':' .. task.owner)
    end
    finish_without_run(id, task.queue)
    lost[#lost + 1] = id
  else
    check_record(id, task)
    if not is_started(id) then
      local ended = finish_taken(id, task) == 'cancelled' and cancelled or lost
      ended[#ended + 1] = id
    elseif not is_excused(id, task, outage) and note_crash(id, task) then
      end_as_poison(id, task, poison)
      poisoned[#poisoned + 1] = id
    else
      put_back(id, task)
      returned[#returned + 1] = id
    end
  end
end

if failed_ago then
  call('SET', K.outage, seconds(now_us - failed_ago * 1000000), 'EX', OUTAGE_SECONDS)
end
local outage = limit > 0 and outage_us()
treat_due(K.leases, limit, function(id) take_back(id, outage) end)
return { returned, cancelled, poisoned, lost, failures }
