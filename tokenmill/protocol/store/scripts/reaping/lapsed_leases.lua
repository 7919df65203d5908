-- Requeues claimed tasks whose lease has lapsed. ARGV: retention, maximum number of tasks (0 only records the
-- outage), seconds since a call of the caller to Redis failed or '', JSON of the error `poison`, RQ's exception of
-- it, type of RQ's result. Returns {ids requeued}, {ids cancelled}, {ids poisoned}, {ids lost}, {id, reason of each
-- failure}.

local limit, failed_ago = tonumber(ARGV[2]), tonumber(ARGV[3])
local poison = { error_json = ARGV[4], exc_string = ARGV[5], result_type = ARGV[6] }
local returned, cancelled, poisoned, lost = {}, {}, {}, {}
-- An outage excuses an owner whose last renewal is at most this much older.
local OUTAGE_SECONDS = 86400

-- A lower bound of the server's start time; 0 if unknown.
local function started_us()
  local known, info = pcall(call, 'INFO', 'server')
  local uptime = known and tonumber(string.match(info, 'uptime_in_seconds:(%d+)'))
  return uptime and now_us - (uptime + 1) * 1000000 or 0
end

-- When Redis last failed a caller; 0 if unknown or if the clock was set back since.
local function failed_us()
  local kept = tonumber(call('GET', K.outage) or 0) * 1000000
  return kept <= now_us and kept or 0
end

-- An owner that has not renewed since an outage may have shut down in order without being able to hand back.
local function is_excused(id, task, outage)
  local renewed_at = (call('ZSCORE', K.leases, id) - (tonumber(task.lease_seconds) or 0)) * 1000000
  return renewed_at < outage and renewed_at > outage - OUTAGE_SECONDS * 1000000
end

local function reclaim(id, outage)
  local task = hash(K.run .. id)
  if not task.owner then
    call('ZREM', K.leases, id)
  elseif not is_complete(task) then
    if task.queue then
      drop_execution(task.queue, id, id .. ':' .. task.owner)
    end
    finish_without_run_hash(id, task.queue)
    lost[#lost + 1] = id
  else
    check_record(id, task)
    if not is_started(id) then
      local ended = finish_removed_job(id, task) == 'cancelled' and cancelled or lost
      ended[#ended + 1] = id
    elseif not is_excused(id, task, outage) and record_crash(id, task) then
      finish_poisoned(id, task, poison)
      poisoned[#poisoned + 1] = id
    else
      requeue(id, task)
      returned[#returned + 1] = id
    end
  end
end

if failed_ago then
  -- Another caller may have reported a later failure.
  call('SET', K.outage, seconds(math.max(failed_us(), now_us - failed_ago * 1000000)), 'EX', OUTAGE_SECONDS)
end
-- When Redis was last unavailable: it failed a caller, or started.
local outage = limit > 0 and math.max(failed_us(), started_us())
process_due(K.leases, limit, function(id) reclaim(id, outage) end)
return { returned, cancelled, poisoned, lost, failures }
