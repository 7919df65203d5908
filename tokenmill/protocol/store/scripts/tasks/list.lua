-- One page of a tenant's tasks, newest first. ARGV: retention, hash of the tenant, acceptance and id of the last task
-- of the page before ('+inf' and '' for the first page), oldest acceptance ('-inf' for any), tasks to examine, status
-- or '', model or ''. Returns {examined, acceptance and id of the last one examined, {{id, run hash, length of the
-- log, last entry} of each task that fits}, now}.

local index, newest, after, oldest = K.tasks .. ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local count, status, model = tonumber(ARGV[6]), ARGV[7], ARGV[8]

local function status_of(terminal, scheduled_at)
  return terminal or (scheduled_at and 'in_progress' or 'queued')
end

local rows, found = {}, redis.pcall('ZRANGE', index, newest, oldest, 'BYSCORE', 'REV', 'LIMIT', 0, count + 1, 'WITHSCORES')
local examined, last_score, last_id = 0, newest, after
for i = 1, found.err and 0 or #found, 2 do
  local id, score = found[i], found[i + 1]
  -- Two models may have accepted tasks in the same microsecond, whose ids are in descending order.
  if not (score == newest and after ~= '' and id >= after) and examined < count then
    examined, last_score, last_id = examined + 1, score, id
    local kept = redis.pcall('HMGET', K.run .. id, 'terminal', 'scheduled_at', 'model', 'queue')
    local terminal, scheduled_at, its_model, queue = unpack(kept.err and {} or kept)
    local fits = queue and (status == '' or status == status_of(terminal, scheduled_at))
      and (model == '' or model == its_model)
    if fits then
      local entry = redis.pcall('XREVRANGE', K.log .. id, '+', '-', 'COUNT', 1)
      local length = redis.pcall('XLEN', K.log .. id)
      rows[#rows + 1] = { id, call('HGETALL', K.run .. id), type(length) == 'number' and length or 0,
        not entry.err and entry[1] and entry[1][2] or false }
    end
  end
end
return { examined, last_score, last_id, rows, seconds(now_us) }
