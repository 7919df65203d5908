-- Extends leases and records the phase of each task (`TaskPhase` in records.py). ARGV: retention, lease in seconds;
-- id, owner and phase of each. Returns {ids not owned}, {ids cancelled under the caller}, {id, reason of each
-- failure}; a task that failed keeps its lease.

local lease = tonumber(ARGV[2])
local lapses = seconds(now_us + lease * 1000000)
local lost, cancelled = {}, {}

local function extend(id, owner, phase, kept)
  local execution = K.rq_execution .. id .. ':' .. owner
  check_type('hash', K.rq_job .. id)
  check_type('hash', execution)
  call('ZADD', K.leases, lapses, id)
  if kept.phase ~= phase or tonumber(kept.lease_seconds) ~= lease then
    call('HSET', K.run .. id, 'standing', phase, 'lease_seconds', ARGV[2])
  end
  call('HSET', K.rq_job .. id, 'last_heartbeat', utcformat(now_us))
  call('HSET', execution, 'last_heartbeat', seconds(now_us))
end

local function renew(id, owner, phase)
  local present_owner, recorded, recorded_lease = unpack(
    call('HMGET', K.run .. id, 'owner', 'standing', 'lease_seconds'))
  if present_owner ~= owner then
    retract_crash(id, owner)
    local gone = ended_under(id, owner) == 'cancelled' and cancelled or lost
    gone[#gone + 1] = id
  elseif is_started(id) then
    extend(id, owner, phase, { phase = recorded, lease_seconds = recorded_lease })
  else
    local task = hash(K.run .. id)
    check_record(id, task)
    local gone = finish_removed_job(id, task) == 'cancelled' and cancelled or lost
    gone[#gone + 1] = id
  end
end

for i = 3, #ARGV, 3 do
  protect(ARGV[i], renew, ARGV[i], ARGV[i + 1], ARGV[i + 2])
end
return { lost, cancelled, failures }
