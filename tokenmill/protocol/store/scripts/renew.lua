-- Moves the ends of leases away, and records how each task stands in its worker (see `Standing` in records.py).
-- ARGV: retention, seconds of the lease; id, owner and standing of each.
-- Returns {ids that another owner has now, or none}, {ids that were cancelled in the caller's hands}, {id, reason of
-- each failure}: such a task keeps its lease.

local lease = tonumber(ARGV[2])
local lapses = seconds(now_us + lease * 1000000)
local lost, cancelled = {}, {}

local function extend(id, owner, standing, kept)
  local execution = K.rq_execution .. id .. ':' .. owner
  check_type('hash', K.rq_job .. id)
  check_type('hash', execution)
  call('ZADD', K.leases, lapses, id)
  if kept.standing ~= standing or tonumber(kept.lease_seconds) ~= lease then
    call('HSET', K.run .. id, 'standing', standing, 'lease_seconds', ARGV[2])
  end
  call('HSET', K.rq_job .. id, 'last_heartbeat', utcformat(now_us))
  call('HSET', execution, 'last_heartbeat', seconds(now_us))
end

local function renew(id, owner, standing)
  local present_owner, recorded, recorded_lease = unpack(
    call('HMGET', K.run .. id, 'owner', 'standing', 'lease_seconds'))
  if present_owner ~= owner then
    absolve(id, owner)
    local gone = ended_under(id, owner) == 'cancelled' and cancelled or lost
    gone[#gone + 1] = id
  elseif is_started(id) then
    extend(id, owner, standing, { standing = recorded, lease_seconds = recorded_lease })
  else
    local task = hash(K.run .. id)
    check_record(id, task)
    local gone = finish_taken(id, task) == 'cancelled' and cancelled or lost
    gone[#gone + 1] = id
  end
end

for i = 3, #ARGV, 3 do
  isolate(ARGV[i], renew, ARGV[i], ARGV[i + 1], ARGV[i + 2])
end
return { lost, cancelled, failures }
