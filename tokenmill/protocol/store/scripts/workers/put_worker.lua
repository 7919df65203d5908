-- Stores the record of a worker with the time. ARGV: retention, name, slug, '1' if ready, JSON object, lifetime in
-- ms.

local name, ready, lapses = ARGV[2], K.ready .. ARGV[3], seconds(now_us + ARGV[6] * 1000)
local record = '{"reported_at":' .. seconds(now_us) .. ',' .. string.sub(ARGV[5], 2)
call('SET', K.worker .. name, record, 'PX', ARGV[6])
for _, key in ipairs({ K.workers, ready }) do
  call('ZREMRANGEBYSCORE', key, '-inf', seconds(now_us))
end
call('ZADD', K.workers, lapses, name)
if ARGV[4] == '1' then
  call('ZADD', ready, lapses, name)
else
  call('ZREM', ready, name)
end
