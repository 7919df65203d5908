-- The limits that tasks set for themselves, as far as they pass while a task waits here. Knows no end.

-- Each with the field of the run hash that says that it was kept; the last is kept by the end alone.
local LIMITS = {
  { name = 'queue_timeout_seconds', kept = 'scheduled_at' },
  { name = 'ttft_timeout_seconds', kept = 'first_token_at' },
  { name = 'timeout_seconds', kept = 'terminal' },
}

-- The name of the limit of a task (its run hash as a table) that passes first; nil if it has none.
local function first_limit(task)
  local first
  for _, limit in ipairs(LIMITS) do
    local given = not task[limit.kept] and tonumber(task[limit.name])
    if given and (not first or given < tonumber(task[first])) then
      first = limit.name
    end
  end
  return first
end

local function watch(slug, id, task)
  local limit = first_limit(task)
  if limit then
    call('ZADD', K.deadlines .. slug, seconds(task.accepted_us + task[limit] * 1000000), id)
  end
end

local function unwatch(slug, id)
  call('ZREM', K.deadlines .. slug, id)
end
