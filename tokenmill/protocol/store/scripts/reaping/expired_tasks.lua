-- Removes tasks whose keys have expired from the lists of their tenants. ARGV: retention, maximum number of tasks.
-- Returns {failures}.

local failures = {}
if call('TYPE', K.ended).ok == 'zset' then
  for _, member in ipairs(call('ZRANGE', K.ended, '-inf', seconds(now_us), 'BYSCORE', 'LIMIT', 0, ARGV[2])) do
    local tenant, id = string.match(member, '^([^:]*):(.*)$')
    local left_ms = call('PTTL', K.run .. id)
    if left_ms > 0 then
      -- Kept for longer since it ended.
      call('ZADD', K.ended, seconds(now_us + left_ms * 1000), member)
    else
      redis.pcall('ZREM', K.tasks .. tenant, id)
      call('ZREM', K.ended, member)
    end
  end
end
return { failures }
