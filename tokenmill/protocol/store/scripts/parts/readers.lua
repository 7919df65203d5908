-- Readers of tasks that are cancelled when their last reader disconnects.

local function has_readers(id)
  call('ZREMRANGEBYSCORE', K.readers .. id, '-inf', seconds(now_us))
  return call('EXISTS', K.readers .. id) == 1
end

-- Cancels a task without readers. Returns whether it had not ended before.
local function cancel_unread(id)
  local task = hash(K.run .. id)
  call('ZREM', K.watched, id)
  if not task.slug or task.terminal then
    return false
  end
  cancel(id, task)
  return true
end

-- Called when all readers should have lapsed; others may have come since.
local function cancel_if_unread(id)
  if not has_readers(id) then
    return cancel_unread(id)
  end
  local last = call('ZRANGE', K.readers .. id, -1, -1, 'WITHSCORES')
  call('ZADD', K.watched, last[2], id)
  return false
end
