-- Whether the record of a worker is to be believed. Knows no task.

-- By this much the clock may be set back without a record being invalid.
local RECORD_SLACK_US = 1000000

-- The record of a worker; nil if there is none, or if it was written in the future: the clock was set back since.
local function valid_record(name)
  local record = call('GET', K.worker .. name)
  local reported = record and tonumber(string.match(record, '^{"reported_at":([%d.]+),'))
  if record and (not reported or reported * 1000000 <= now_us + RECORD_SLACK_US) then
    return record
  end
  return nil
end
