-- Who reads a task that ends with its last reader. Knows neither connections nor processes.

local function is_read(id)
  call('ZREMRANGEBYSCORE', K.readers .. id, '-inf', seconds(now_us))
  return call('EXISTS', K.readers .. id) == 1
end

-- Its last reader has gone away. Gives whether that ended it.
local function end_as_unread(id)
  local task = hash(K.run .. id)
  call('ZREM', K.watched, id)
  if not task.slug or task.terminal then
    return false
  end
  cancel(id, task)
  return true
end

-- Its readers should have lapsed; perhaps some have left, and others are there.
local function end_unread(id)
  if not is_read(id) then
    return end_as_unread(id)
  end
  local last = call('ZRANGE', K.readers .. id, -1, -1, 'WITHSCORES')
  call('ZADD', K.watched, last[2], id)
  return false
end
