-- Takes webhooks for a deliverer: first those of deliverers idle for too long, then new ones and due retries. ARGV:
-- retention, maximum number, idle time in milliseconds. Returns {entry, id, URL, failed attempts, tenant} for each.

local limit, idle_ms = tonumber(ARGV[2]), ARGV[3]
local taken = {}

local function take(entries)
  for _, entry in ipairs(entries) do
    local id = entry[2][2]
    local url, tries, tenant = unpack(call('HMGET', K.run .. id, 'webhook', 'webhook_tries', 'tenant'))
    if url then
      taken[#taken + 1] = { entry[1], id, url, tries or '0', tenant or '' }
    else
      -- Delivered meanwhile, or the task was deleted by hand.
      remove_from_outbox(entry[1])
    end
  end
end

for _, id in ipairs(call('ZRANGEBYSCORE', K.outbox_due, '-inf', seconds(now_us), 'LIMIT', 0, limit)) do
  call('ZREM', K.outbox_due, id)
  add_to_outbox(id)
end
if call('EXISTS', K.outbox) == 1 then
  -- Recreates a group lost by hand; if it exists, Redis returns an error, which is ignored.
  redis.pcall('XGROUP', 'CREATE', K.outbox, GROUP, '0')
  take(call('XAUTOCLAIM', K.outbox, GROUP, CONSUMER, idle_ms, '0', 'COUNT', limit)[2])
  local fresh = #taken < limit
    and call('XREADGROUP', 'GROUP', GROUP, CONSUMER, 'COUNT', limit - #taken, 'STREAMS', K.outbox, '>')
  take(fresh and fresh[1][2] or {})
end
return taken
