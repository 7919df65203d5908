-- How fast a model's waiting tasks are worked off. Measured only while tasks wait although workers have some:
-- then the workers are full, and what ends in that time is what they can do. Time without work or without
-- workers does not count. Kept in the hash `pace`: `owned`, the cost of the claimed tasks; `mark`, until when time
-- was counted, absent while nothing is measured; `tokens` and `us`, both fading with the measured time; `seen`,
-- tokens that have ended in it; `known`.

-- What was measured this long ago counts a third, in microseconds.
local FADING_US = 60000000
-- How long a rate is remembered, in milliseconds.
local REMEMBERED_MS = 86400000

-- Adds what has ended, and the time since the mark.
local function measure(slug, num_tokens)
  local key = K.pace .. slug
  local mark, tokens, us, seen, owned = unpack(call('HMGET', key, 'mark', 'tokens', 'us', 'seen', 'owned'))
  if not mark then
    return
  end
  local passed_us = math.max(0, now_us - mark)
  local fading = math.exp(-passed_us / FADING_US)
  tokens, us = (tonumber(tokens) or 0) * fading + num_tokens, (tonumber(us) or 0) * fading + passed_us
  seen = (tonumber(seen) or 0) + num_tokens
  call('HSET', key, 'mark', whole(now_us), 'tokens', string.format('%.6f', tokens), 'us', whole(us), 'seen', whole(seen))
  -- Before as much has ended as is under way, the small and the first would speak for all.
  if seen > 0 and us > 0 and seen >= (tonumber(owned) or 0) then
    call('HSET', key, 'known', 1)
  end
  call('PEXPIRE', key, REMEMBERED_MS)
end

local function stop_measuring(slug)
  call('HDEL', K.pace .. slug, 'mark')
end

-- To be called after each claim: the workers have what they wanted, and the rest waits for them.
local function measure_after_claim(slug, num_waiting)
  measure(slug, 0)
  local key = K.pace .. slug
  if num_waiting == 0 then
    stop_measuring(slug)
  elseif tonumber(call('HGET', key, 'owned') or 0) > 0 then
    call('HSETNX', key, 'mark', whole(now_us))
  end
end

-- The cost of a task that was claimed, or the same below zero when its owner is done with it.
local function note_owned(slug, cost)
  if call('HINCRBY', K.pace .. slug, 'owned', cost) <= 0 then
    call('HDEL', K.pace .. slug, 'owned')
    stop_measuring(slug)
  end
end

-- Tokens per second, as text; false as long as it was not measured.
local function drain_rate(slug)
  local tokens, us, known = unpack(call('HMGET', K.pace .. slug, 'tokens', 'us', 'known'))
  if not known or not tokens or not tonumber(us) or tonumber(us) <= 0 then
    return false
  end
  return string.format('%.6f', tokens / (us / 1000000))
end

local function num_ready_workers(slug)
  return call('ZCOUNT', K.ready .. slug, seconds(now_us), '+inf')
end
