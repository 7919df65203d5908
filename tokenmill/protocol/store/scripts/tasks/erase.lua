-- Deletes everything about an ended task. ARGV: retention, id. Returns nil if there is no such task, 0 if it has not
-- ended, 1 if it was deleted.

local id = ARGV[2]
local task = hash(K.run .. id)
if not task.queue then
  return false
end
if not task.terminal then
  return 0
end
ensure_model_keys(task.slug or '')
ensure_queue_keys(task.slug or '', task.queue)
-- A deliverer that holds the webhook finds no task and drops it.
call('ZREM', K.outbox_due, id)
for _, registry in ipairs({ K.rq_finished, K.rq_failed, K.rq_canceled }) do
  call('ZREM', registry .. task.queue, id)
end
unlist(id, task.queue)
local record = task.idempotency
if record and not string.match(call('GET', record) or '', ':' .. id .. '$') then
  record = nil
end
for _, key in ipairs({ K.log .. id, K.rq_job .. id, K.rq_results .. id, K.readers .. id, record }) do
  call('DEL', key)
end
-- Last: until then the call can be repeated.
call('DEL', K.run .. id)
return 1
