-- Refuses late calls, and reads the first argument of every script. A server that was stopped runs calls whose
-- callers have given up: such a call changes nothing and replies TOOLATE.

-- ARGV[1]: the retention in milliseconds; after a colon, the time in microseconds at which the caller times out, if
-- known; then an optional `!`, with which a late call replies an error with the code TOOLATE.

local call = redis.call
local retention, wanted_until, late_is_error = string.match(ARGV[1], '^(%d+):?(-?%d*)(!?)$')
local retention_ms = tonumber(retention)
-- Redis's clock, the only one that scripts use: host clocks differ.
local time = call('TIME')
local now_us = time[1] * 1000000 + time[2]

if wanted_until ~= '' and now_us > tonumber(wanted_until) then
  if late_is_error == '!' then
    return redis.error_reply('TOOLATE the caller no longer waits for this call')
  end
  return redis.status_reply('TOOLATE')
end
