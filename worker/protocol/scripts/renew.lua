-- Moves the ends of leases away, and records how each task stands in its worker (see `Standing` in records.py).
-- ARGV: retention, seconds of the lease; id, owner and standing of each.
-- Gives {ids that are another's or nobody's now}, {ids that were cancelled in the caller's hands}.

local lapses = seconds(now_us + tonumber(ARGV[2]) * 1000000)
local lost, cancelled = {}, {}
for i = 3, #ARGV, 3 do
  local id, owner, standing = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local present_owner, recorded = unpack(call('HMGET', K.run .. id, 'owner', 'standing'))
  if present_owner ~= owner then
    absolve(id, owner)
    local gone = ended_under(id, owner) == 'cancelled' and cancelled or lost
    gone[#gone + 1] = id
  elseif is_started(id) then
    call('ZADD', K.leases, lapses, id)
    if recorded ~= standing then
      call('HSET', K.run .. id, 'standing', standing)
    end
    call('HSET', K.rq_job .. id, 'last_heartbeat', utcformat(now_us))
    call('HSET', K.rq_execution .. id .. ':' .. owner, 'last_heartbeat', seconds(now_us))
  else
    finish_cancelled(id, hash(K.run .. id))
    cancelled[#cancelled + 1] = id
  end
end
return { lost, cancelled }
