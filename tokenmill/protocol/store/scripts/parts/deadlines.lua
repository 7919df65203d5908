-- Time limits of waiting tasks.

-- Each limit with the field of the run hash that is set once the limit is met. The last is met by the end itself.
local LIMITS = {
  { name = 'queue_timeout_seconds', kept = 'scheduled_at' },
  { name = 'ttft_timeout_seconds', kept = 'first_token_at' },
  { name = 'timeout_seconds', kept = 'terminal' },
}

-- The name of the limit of a task (its run hash as a table) that passes first; nil if it has none.
local function first_limit(task)
  local first
  for _, limit in ipairs(LIMITS) do
    local value = not task[limit.kept] and tonumber(task[limit.name])
    if value and (not first or value < tonumber(task[first])) then
      first = limit.name
    end
  end
  return first
end

local function add_deadline(slug, id, task)
  local limit = first_limit(task)
  if limit then
    call('ZADD', K.deadlines .. slug, seconds(task.accepted_us + task[limit] * 1000000), id)
  end
end

local function remove_deadline(slug, id)
  call('ZREM', K.deadlines .. slug, id)
end
