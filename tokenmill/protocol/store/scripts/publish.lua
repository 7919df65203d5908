-- Adds messages, facts and ends to tasks, each only for its owner. All writes of one call are one change.
-- ARGV: retention, and one string of fields, each with the byte 31 after it: hundreds of arguments would
-- cost the client more than all the rest. The fields of each write: id, owner, first seq, number of
-- entries, number of facts, scheduled (seconds ago, or ''), status or '' | token, text, index, end of each entry |
-- name, value of each fact | and with a status: reason, type of RQ's result, its return value, its
-- exception, prompt tokens, completion tokens, 1 or '': an error that the client can correct.
-- Returns for each write ACCEPTED, LOST, CANCELLED or, if its first seq is too high, the length of the log; or, as
-- text, why it failed: the other writes are stored.
-- Runs once for every step of an engine: a plain write costs HGET, XLEN, XADD and PUBLISH, no more.

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
  add_result(id, task, { type = fields[at + 1], return_value = fields[at + 2], exc_string = fields[at + 3] })
  finish(id, task, { status = status, reason = fields[at], prompt_tokens = fields[at + 4],
    completion_tokens = fields[at + 5], is_client_error = fields[at + 6] ~= '' })
end

-- Not the owner. But perhaps the same call again, as its reply was lost: the settlement was this owner's.
local function refuse(id, owner, sent, length)
  local terminal = ended_under(id, owner)
  if terminal == 'cancelled' then
    return CANCELLED
  end
  if terminal and sent <= length then
    return ACCEPTED
  end
  absolve(id, owner)
  return LOST
end

local function store(at, count, facts_at, settlement_at)
  local id, first, status = fields[at], tonumber(fields[at + 2]), fields[at + 6]
  local length = redis.pcall('XLEN', K.log .. id)
  if type(length) == 'table' then
    -- No log: one task must not keep the others of this call from being written.
    call('DEL', K.log .. id)
    length = 0
  end
  local owner = redis.pcall('HGET', K.run .. id, 'owner')
  if owner ~= fields[at + 1] then
    return refuse(id, fields[at + 1], first + count, length)
  elseif first > length then
    return length
  elseif status ~= '' and not is_started(id) then
    -- Cancelled or deleted with RQ's own tools.
    return finish_taken(id, hash(K.run .. id)) == 'cancelled' and CANCELLED or LOST
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
