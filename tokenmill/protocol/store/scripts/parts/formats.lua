-- Formats of numbers and times, and hashes as tables.

-- Lua would format numbers of more than 14 digits as 1.7e+15.
local function whole(number)
  return string.format('%.0f', number)
end

local function seconds(us)
  return string.format('%.6f', us / 1000000)
end

-- RQ's utcformat, by the proleptic Gregorian calendar in eras of 400 years from 1 March 0000.
local function utcformat(us)
  local days = math.floor(us / 86400000000)
  local rest = us - days * 86400000000
  local shifted = days + 719468
  local era = math.floor(shifted / 146097)
  local day_of_era = shifted - era * 146097
  local year_of_era = math.floor((day_of_era - math.floor(day_of_era / 1460)
    + math.floor(day_of_era / 36524) - math.floor(day_of_era / 146096)) / 365)
  local day_of_year = day_of_era
    - (365 * year_of_era + math.floor(year_of_era / 4) - math.floor(year_of_era / 100))
  local month = math.floor((5 * day_of_year + 2) / 153)
  local day = day_of_year - math.floor((153 * month + 2) / 5) + 1
  month = month < 10 and month + 3 or month - 9
  local year = year_of_era + era * 400 + (month <= 2 and 1 or 0)
  return string.format('%04d-%02d-%02dT%02d:%02d:%02d.%06dZ', year, month, day,
    math.floor(rest / 3600000000), math.floor(rest / 60000000) % 60, math.floor(rest / 1000000) % 60,
    rest % 1000000)
end

-- A hash as a table; empty if the key does not exist or has another type.
local function hash(key)
  local flat, fields = redis.pcall('HGETALL', key), {}
  for i = 1, #flat, 2 do
    fields[flat[i]] = flat[i + 1]
  end
  return fields
end
