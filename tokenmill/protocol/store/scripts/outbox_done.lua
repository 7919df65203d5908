-- A webhook was delivered or given up: what was kept for it expires as the rest. ARGV: retention, entry, id.

-- So long at least the task can still be asked for, by who has just been told of it.
local LEAST_MS = 60000

local id = ARGV[3]
local task = hash(K.run .. id)
take_off(ARGV[2])
call('ZREM', K.outbox_due, id)
if task.webhook then
  call('HDEL', K.run .. id, 'webhook', 'webhook_tries')
  local left_ms = task.finished_at * 1000 + retention_ms - now_us / 1000
  expire(id, task, whole(math.max(left_ms, math.min(retention_ms, LEAST_MS))))
end
