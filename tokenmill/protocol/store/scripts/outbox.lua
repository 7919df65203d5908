-- Ended tasks whose webhooks are not yet delivered. Knows no receiver.

-- So long a task and the notes about it are kept for its webhook at most: all tries take a day.
local OUTBOX_MS = 172800000
local GROUP = 'deliverers'
-- Who holds an entry does not matter, only for how long: one name serves all deliverers.
local CONSUMER = 'api'

-- To be delivered now. Whoever makes the stream makes its group, so that no entry is older than that.
local function put_out(id)
  if call('EXISTS', K.outbox) == 0 then
    call('XGROUP', 'CREATE', K.outbox, GROUP, '0', 'MKSTREAM')
  end
  call('XADD', K.outbox, '*', 'id', id)
  call('PEXPIRE', K.outbox, OUTBOX_MS)
end

-- Gives whether a deliverer still had it.
local function take_off(entry)
  local had = call('EXISTS', K.outbox) == 1 and call('XACK', K.outbox, GROUP, entry) == 1
  call('XDEL', K.outbox, entry)
  return had
end
