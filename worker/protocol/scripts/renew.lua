-- Moves the ends of leases away. ARGV: retention, seconds of the lease, id and owner of each.
-- Gives {ids that are another's or nobody's now}, {ids that were cancelled in the caller's hands}.

local lapses = seconds(now_us + tonumber(ARGV[2]) * 1000000)
local lost, cancelled = {}, {}
for i = 3, #ARGV, 2 do
  local id, owner = ARGV[i], ARGV[i + 1]
  if call('HGET', K.run .. id, 'owner') ~= owner then
    local gone = ended_under(id, owner) == 'cancelled' and cancelled or lost
    gone[#gone + 1] = id
  elseif is_started(id) then
    call('ZADD', K.leases, lapses, id)
    call('HSET', K.rq_job .. id, 'last_heartbeat', utcformat(now_us))
    call('HSET', K.rq_execution .. id .. ':' .. owner, 'last_heartbeat', seconds(now_us))
  else
    finish_cancelled(id, hash(K.run .. id))
    cancelled[#cancelled + 1] = id
  end
end
return { lost, cancelled }
