-- Adds entries, facts and settlements to tasks, each only if sent by its owner, in one atomic change. Runs once per
-- engine step; a write of one token costs HGET, XLEN, XADD and PUBLISH. ARGV: retention, and one string of fields,
-- each followed by byte 31 (hundreds of arguments would dominate the client's cost). The fields of each write:
--   id, owner, first seq, number of entries, number of facts, scheduled (seconds ago, or ''), status or '';
--   for each entry: token, text, index, members;
--   for each fact: name, value;
--   with a status: reason, type of RQ's result, its return value, its exception, prompt tokens, completion tokens,
--   '1' for an error of the client, or ''.
-- Returns for each write ACCEPTED, LOST, CANCELLED or, if its first seq is too high, the length of the log; or an
-- error text, and the other writes are stored.

local fields, num_fields = {}, 0
for text in string.gmatch(ARGV[2], '([^\31]*)\31') do
  num_fields = num_fields + 1
  fields[num_fields] = text
end

local ACCEPTED, LOST, CANCELLED = -1, -2, -3
local HEADER, ENTRY, SETTLEMENT = 7, 4, 7

local function add_entries(id, first, count, length, at)
  for seq = length, first + count - 1 do
    local entry = at + ENTRY * (seq - first)
    append(id, seq, fields[entry], fields[entry + 1], fields[entry + 2], fields[entry + 3])
  end
  if length == 0 and fields[at] ~= '' then
    call('HSETNX', K.run .. id, 'first_token_at', seconds(now_us))
  end
end

local function add_facts(id, scheduled, at, settlement_at)
  if scheduled ~= '' then
    local accepted_us = tonumber(call('HGET', K.run .. id, 'accepted_us'))
    call('HSETNX', K.run .. id, 'scheduled_at', seconds(math.max(accepted_us, now_us - scheduled * 1000000)))
    call('HDEL', K.run .. id, 'waiting_for', 'tokens_ahead', 'position')
  end
  if at < settlement_at then
    call('HSET', K.run .. id, unpack(fields, at, settlement_at - 1))
  end
end

local function settle(id, status, at)
  local task = hash(K.run .. id)
  add_rq_result(id, task, { type = fields[at + 1], return_value = fields[at + 2], exc_string = fields[at + 3] })
  finish(id, task, { status = status, reason = fields[at], prompt_tokens = fields[at + 4],
    completion_tokens = fields[at + 5], is_client_error = fields[at + 6] ~= '' })
end

-- The caller is not the owner. If it was when the task ended, this may be a repeated call whose reply was lost.
local function refuse(id, owner, sent, length)
  local terminal = ended_under(id, owner)
  if terminal == 'cancelled' then
    return CANCELLED
  end
  if terminal and sent <= length then
    return ACCEPTED
  end
  retract_crash(id, owner)
  return LOST
end

local function store(at, count, facts_at, settlement_at)
  local id, first, status = fields[at], tonumber(fields[at + 2]), fields[at + 6]
  local length = redis.pcall('XLEN', K.log .. id)
  if type(length) == 'table' then
    -- Of another type: it must not prevent the other writes.
    call('DEL', K.log .. id)
    length = 0
  end
  local owner = redis.pcall('HGET', K.run .. id, 'owner')
  if owner ~= fields[at + 1] then
    return refuse(id, fields[at + 1], first + count, length)
  elseif first > length then
    return length
  elseif status ~= '' and not is_started(id) then
    -- Cancelled or deleted with RQ's tools.
    return finish_removed_job(id, hash(K.run .. id)) == 'cancelled' and CANCELLED or LOST
  end
  add_facts(id, fields[at + 5], facts_at, settlement_at)
  if count > 0 then
    add_entries(id, first, count, length, at + HEADER)
  end
  if status ~= '' then
    settle(id, status, settlement_at)
  end
  return ACCEPTED
end

local outcomes, at = {}, 1
while fields[at] do
  local count = tonumber(fields[at + 3])
  local facts_at = at + HEADER + ENTRY * count
  local settlement_at = facts_at + 2 * fields[at + 4]
  local worked, outcome = pcall(store, at, count, facts_at, settlement_at)
  outcomes[#outcomes + 1] = worked and outcome or reason_of(outcome)
  at = settlement_at + (fields[at + 6] ~= '' and SETTLEMENT or 0)
end
return outcomes
