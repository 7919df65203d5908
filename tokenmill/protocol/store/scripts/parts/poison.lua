-- Detects tasks that crash their workers. A crash is recorded with the phase of the task and the length of its log;
-- progress changes the length and so voids the record without another write. `task` is a run hash as a table.

-- Crashes of isolated runs after which a task ends as poisoned.
local MAX_ISOLATED_CRASHES = 3
-- Crashes in a row while the task waited that make it a suspect: it may have been scheduled just before each.
local MAX_WAITING_CRASHES = 3

-- "<owner>=<phase> " for each crash since the last entry of the log.
local function crashes_of(task, length)
  return tonumber(task.crashes_at) == length and task.crashes or ''
end

local function count_phase(crashes, phase)
  local _, number = string.gsub(crashes, '=' .. phase .. ' ', '')
  return number
end

local function is_suspect(crashes)
  return count_phase(crashes, 'seated') + count_phase(crashes, 'alone') > 0
    or count_phase(crashes, 'waiting') >= MAX_WAITING_CRASHES
end

-- Records that the owner of a task crashed. Returns whether the task is poisoned.
local function record_crash(id, task)
  local length, claimed_length = call('XLEN', K.log .. id), tonumber(task.claimed_length)
  -- Claims by older versions have no length.
  if task.standing == 'untouched' or not claimed_length or length > claimed_length then
    return false
  end
  local crashes = crashes_of(task, length) .. task.owner .. '=' .. task.standing .. ' '
  call('HSET', K.run .. id, 'crashes', crashes, 'crashes_at', length)
  return count_phase(crashes, 'alone') >= MAX_ISOLATED_CRASHES
end

-- An owner that was presumed dead renews or writes after all: its crash is retracted.
local function retract_crash(id, owner)
  local crashes, terminal = unpack(call('HMGET', K.run .. id, 'crashes', 'terminal'))
  if crashes and not terminal and string.find(crashes, owner .. '=', 1, true) then
    call('HSET', K.run .. id, 'crashes', (string.gsub(crashes, owner .. '=%a+ ', '')))
  end
end

-- how: result_type (of RQ), error_json, exc_string (for RQ).
local function finish_poisoned(id, task, how)
  add_rq_result(id, task, { type = how.result_type, exc_string = how.exc_string })
  -- The owner may still be alive.
  finish_without_owner(id, task, { status = 'failed', reason = 'error', is_against_owner = true }, how.error_json)
end
