-- The state of a task. ARGV: retention, id. Returns nil if there is no such task, or {run hash, length of the log,
-- now, position, tokens ahead, drain rate, ready workers, next attempt of its webhook}.

local id = ARGV[2]
local run = call('HGETALL', K.run .. id)
if #run == 0 then
  return false
end
local slug, queue, terminal, owner = unpack(call('HMGET', K.run .. id, 'slug', 'queue', 'terminal', 'owner'))
local position, tokens
if not terminal and not owner then
  -- Scripts that write repair a damaged index; until then the position is unknown.
  local found, its_position, its_tokens = pcall(queue_position, queue, slug, id)
  position, tokens = found and its_position, found and its_tokens
end
return { run, call('XLEN', K.log .. id), seconds(now_us), position or false, tokens or false,
  drain_rate(slug), num_ready_workers(slug), redis.pcall('ZSCORE', K.outbox_due, id) }
