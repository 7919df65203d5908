-- Removes a webhook that was delivered or given up; its task expires like others. ARGV: retention, entry, id,
-- 'delivered' or 'failed', status of the last reply or '', error of the last attempt or ''.

-- Minimum time the task is kept for the receiver that was just notified.
local MIN_KEPT_MS = 60000

local id = ARGV[3]
local task = hash(K.run .. id)
remove_from_outbox(ARGV[2])
call('ZREM', K.outbox_due, id)
if task.webhook then
  call('HDEL', K.run .. id, 'webhook')
  call('HINCRBY', K.run .. id, 'webhook_tries', 1)
  call('HSET', K.run .. id, 'webhook_url', task.webhook, 'webhook_state', ARGV[4], 'webhook_status', ARGV[5],
    'webhook_error', ARGV[6], 'webhook_at', seconds(now_us))
  local left_ms = task.finished_at * 1000 + retention_ms - now_us / 1000
  expire_task(id, task, whole(math.max(left_ms, math.min(retention_ms, MIN_KEPT_MS))))
end
