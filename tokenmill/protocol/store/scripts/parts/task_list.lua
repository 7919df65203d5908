-- The tasks of a tenant in order of acceptance, for listing. An entry is removed when the keys of its task expire.

local function tenant_of(queue)
  return string.match(queue, '([^:]*)$')
end

local function list_task(id, queue, accepted_us)
  call('ZADD', K.tasks .. tenant_of(queue), accepted_us, id)
end

-- Removes a task from the list of its tenant once its keys have expired.
local function unlist_later(id, queue, at_us)
  call('ZADD', K.ended, seconds(at_us), tenant_of(queue) .. ':' .. id)
end

local function unlist(id, queue)
  call('ZREM', K.tasks .. tenant_of(queue), id)
  call('ZREM', K.ended, tenant_of(queue) .. ':' .. id)
end
