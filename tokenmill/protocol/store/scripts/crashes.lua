-- Whose worker died, how it stood there then, and whether it is to blame. Knows no lease.
-- A crash is written down with the length that the log had; whatever is logged later makes it void, so that
-- progress costs no write. `task` is a run hash as a table.

-- So many deaths of workers in which it ran alone, and it is ended.
local DEADLY = 3
-- So often in a row it was said to wait when its worker died: it may have got its seat just then.
local COINCIDENCES = 3

-- "<owner>=<standing> " for each crash since its last token.
local function crashes_of(task, length)
  return tonumber(task.crashes_at) == length and task.crashes or ''
end

local function count(crashes, standing)
  local _, number = string.gsub(crashes, '=' .. standing .. ' ', '')
  return number
end

local function is_suspect(crashes)
  return count(crashes, 'seated') + count(crashes, 'alone') > 0 or count(crashes, 'waiting') >= COINCIDENCES
end

-- Its owner has died, as far as can be known. Gives whether it is to blame.
local function note_crash(id, task)
  local length, claimed_length = call('XLEN', K.log .. id), tonumber(task.claimed_length)
  -- Without that length it was claimed by an older version.
  if task.standing == 'untouched' or not claimed_length or length > claimed_length then
    return false
  end
  local crashes = crashes_of(task, length) .. task.owner .. '=' .. task.standing .. ' '
  call('HSET', K.run .. id, 'crashes', crashes, 'crashes_at', length)
  return count(crashes, 'alone') >= DEADLY
end

-- An owner that was taken for dead speaks: what was counted on its account was no crash.
local function absolve(id, owner)
  local crashes, terminal = unpack(call('HMGET', K.run .. id, 'crashes', 'terminal'))
  if crashes and not terminal and string.find(crashes, owner .. '=', 1, true) then
    call('HSET', K.run .. id, 'crashes', (string.gsub(crashes, owner .. '=%a+ ', '')))
  end
end

-- how: type of RQ's result, JSON of the error, RQ's exception of it.
local function end_as_poison(id, task, how)
  add_result(id, task, { type = how.result_type, exc_string = how.exc_string })
  -- That owner may live after all.
  finish_here(id, task, { status = 'failed', reason = 'error', is_against_owner = true }, how.error_json)
end
