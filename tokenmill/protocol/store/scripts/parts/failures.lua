-- Processes records one by one. A record that fails is reported, set aside for a while and left unchanged.

-- When a failed record is retried.
local ASIDE_US = 60000000
-- Error texts are truncated to this length.
local REASON_LENGTH = 300

-- {id, reason, ...} of the records that failed in this call.
local failures = {}

local function reason_of(problem)
  local text = type(problem) == 'table' and problem.err or tostring(problem)
  return string.sub(text, 1, REASON_LENGTH)
end

-- Calls `process` with the arguments. Returns whether it succeeded.
local function protect(id, process, ...)
  local worked, problem = pcall(process, ...)
  if not worked then
    failures[#failures + 1] = id
    failures[#failures + 1] = reason_of(problem)
  end
  return worked
end

local function set_aside(key, id)
  local until_when = seconds(now_us + ASIDE_US)
  call('ZADD', key, 'XX', until_when, id)
  call('ZREMRANGEBYSCORE', K.aside, '-inf', seconds(now_us))
  call('ZADD', K.aside, until_when, id)
  call('PEXPIRE', K.aside, ASIDE_US / 1000)
end

local function is_set_aside(id)
  local until_when = call('ZSCORE', K.aside, id)
  return until_when and tonumber(until_when) * 1000000 > now_us
end

-- Processes the first members of a sorted set whose scores, times in seconds, have passed.
local function process_due(key, limit, process)
  for _, id in ipairs(call('ZRANGEBYSCORE', key, '-inf', seconds(now_us), 'LIMIT', 0, limit)) do
    if not protect(id, process, id) then
      set_aside(key, id)
    end
  end
end
