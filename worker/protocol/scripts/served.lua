-- How fast a model's tasks end: estimated tokens in buckets of ten seconds. Knows no queue.

local BUCKET_US = 10000000
-- The running bucket and five whole ones: about a minute.
local BUCKETS = 6

local function drain(slug, cost)
  local key, bucket = K.drained .. slug, math.floor(now_us / BUCKET_US)
  call('HINCRBY', key, bucket, cost)
  for _, field in ipairs(call('HKEYS', key)) do
    if tonumber(field) <= bucket - BUCKETS then
      call('HDEL', key, field)
    end
  end
  call('PEXPIRE', key, BUCKETS * BUCKET_US / 1000)
end

-- Per second, as text; false when nothing ended lately. A service that has just begun is judged by the
-- time since its first end, but by ten seconds at least.
local function drain_rate(slug)
  local bucket, oldest, sum = math.floor(now_us / BUCKET_US), nil, 0
  for field, cost in pairs(hash(K.drained .. slug)) do
    local number = tonumber(field)
    if number > bucket - BUCKETS then
      oldest = math.min(oldest or number, number)
      sum = sum + cost
    end
  end
  if sum == 0 then
    return false
  end
  local window_us = math.max(now_us - oldest * BUCKET_US, BUCKET_US)
  return string.format('%.6f', sum / (window_us / 1000000))
end

local function num_ready_workers(slug)
  return call('ZCOUNT', K.ready .. slug, seconds(now_us), '+inf')
end
