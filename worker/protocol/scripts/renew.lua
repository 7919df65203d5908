-- Moves the ends of leases away. ARGV: retention, seconds of the lease, id and owner of each.
-- Gives the ids that the caller does not own any more.

local lapses = seconds(now_us + tonumber(ARGV[2]) * 1000000)
local lost = {}
for i = 3, #ARGV, 2 do
  local id, owner = ARGV[i], ARGV[i + 1]
  if call('HGET', K.run .. id, 'owner') ~= owner then
    lost[#lost + 1] = id
  elseif is_started(id) then
    call('ZADD', K.leases, lapses, id)
    call('HSET', K.rq_job .. id, 'last_heartbeat', utcformat(now_us))
    call('HSET', K.rq_execution .. id .. ':' .. owner, 'last_heartbeat', seconds(now_us))
  else
    finish_cancelled(id, hash(K.run .. id))
    lost[#lost + 1] = id
  end
end
return lost
