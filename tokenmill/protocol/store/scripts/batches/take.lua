-- Takes a batch for a runner: of the tenant with the fewest batches in progress, the one that waits longest. ARGV:
-- retention, owner, duration of the lease in seconds. Returns nil, or {id, its hash}.

local SCANNED = 1000
local owner, lease_seconds = ARGV[2], tonumber(ARGV[3])
local now = seconds(now_us)

local running = {}
for _, id in ipairs(call('ZRANGEBYSCORE', K.batches, '(' .. now, '+inf', 'LIMIT', 0, SCANNED)) do
  local tenant, its_owner = unpack(call('HMGET', K.batch .. id, 'tenant', 'owner'))
  if tenant and its_owner ~= '' then
    running[tenant] = (running[tenant] or 0) + 1
  end
end

local best, fewest
for _, id in ipairs(call('ZRANGEBYSCORE', K.batches, '-inf', now, 'LIMIT', 0, SCANNED)) do
  local tenant = call('HGET', K.batch .. id, 'tenant')
  if not tenant then
    call('ZREM', K.batches, id)
  elseif not best or (running[tenant] or 0) < fewest then
    best, fewest = id, running[tenant] or 0
  end
end
if not best then
  return false
end
call('HSET', K.batch .. best, 'owner', owner)
call('ZADD', K.batches, seconds(now_us + lease_seconds * 1000000), best)
return { best, call('HGETALL', K.batch .. best) }
