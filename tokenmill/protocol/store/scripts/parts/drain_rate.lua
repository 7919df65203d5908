-- Measures how fast the workers process a model's tasks, in estimated tokens per second. Only time counts in which
-- tasks wait although workers own some: then the workers are saturated. The hash `pace` has `owned`, the cost of the
-- claimed tasks; `mark`, the time up to which was measured, absent while not measuring; `tokens` and `us`, decaying
-- sums of tokens and time; `seen`, all tokens measured; `known`, set once the rate is representative.

-- Time constant of the decay, in microseconds.
local FADING_US = 60000000
-- How long the measurement is kept, in milliseconds.
local REMEMBERED_MS = 86400000

-- Adds the tokens of an ended task and the time since the mark.
local function record_drained(slug, num_tokens)
  local key = K.pace .. slug
  local mark, tokens, us, seen, owned = unpack(call('HMGET', key, 'mark', 'tokens', 'us', 'seen', 'owned'))
  if not mark then
    return
  end
  local passed_us = math.max(0, now_us - mark)
  local fading = math.exp(-passed_us / FADING_US)
  tokens, us = (tonumber(tokens) or 0) * fading + num_tokens, (tonumber(us) or 0) * fading + passed_us
  seen = (tonumber(seen) or 0) + num_tokens
  call('HSET', key, 'mark', whole(now_us), 'tokens', string.format('%.6f', tokens), 'us', whole(us),
    'seen', whole(seen))
  -- Before as many tokens have ended as are owned, the rate is biased to short tasks.
  if seen > 0 and us > 0 and seen >= (tonumber(owned) or 0) then
    call('HSET', key, 'known', 1)
  end
  call('PEXPIRE', key, REMEMBERED_MS)
end

local function stop_measuring(slug)
  call('HDEL', K.pace .. slug, 'mark')
end

-- Called after each claim. Tasks that still wait prove that the workers are saturated.
local function measure_from_claim(slug, num_waiting)
  record_drained(slug, 0)
  local key = K.pace .. slug
  if num_waiting == 0 then
    stop_measuring(slug)
  elseif tonumber(call('HGET', key, 'owned') or 0) > 0 then
    call('HSETNX', key, 'mark', whole(now_us))
  end
end

-- Adds the cost of a claimed task, or subtracts it at the end of the claim.
local function adjust_owned(slug, cost)
  if call('HINCRBY', K.pace .. slug, 'owned', cost) <= 0 then
    call('HDEL', K.pace .. slug, 'owned')
    stop_measuring(slug)
  end
end

-- Tokens per second as text; false until known.
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
