-- Validity of worker records.

-- Tolerance for a clock that was set back.
local RECORD_SLACK_US = 1000000

-- The record of a worker; nil if missing or from the future, in which case the clock was set back since.
local function valid_record(name)
  local record = call('GET', K.worker .. name)
  local reported = record and tonumber(string.match(record, '^{"reported_at":([%d.]+),'))
  if record and (not reported or reported * 1000000 <= now_us + RECORD_SLACK_US) then
    return record
  end
  return nil
end
