-- Treats the records of a duty one by one: one that fails is reported, set aside for a while and left as it is.

-- A record that failed is treated again after this time.
local ASIDE_US = 60000000
-- An error's text is shortened to this.
local REASON_LENGTH = 300

-- {id, reason, ...}: what could not be treated by this call.
local failures = {}

local function reason_of(problem)
  local text = type(problem) == 'table' and problem.err or tostring(problem)
  return string.sub(text, 1, REASON_LENGTH)
end

-- Calls `treat` with the arguments. Returns whether it worked.
local function isolate(id, treat, ...)
  local worked, problem = pcall(treat, ...)
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

local function is_aside(id)
  local until_when = call('ZSCORE', K.aside, id)
  return until_when and tonumber(until_when) * 1000000 > now_us
end

-- Treats the first members of a sorted set whose scores are times in seconds that have passed.
local function treat_due(key, limit, treat)
  for _, id in ipairs(call('ZRANGEBYSCORE', key, '-inf', seconds(now_us), 'LIMIT', 0, limit)) do
    if not isolate(id, treat, id) then
      set_aside(key, id)
    end
  end
end
