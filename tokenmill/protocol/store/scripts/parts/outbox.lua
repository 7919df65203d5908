-- Ended tasks whose webhooks are not delivered yet.

-- How long a task and its outbox entries are kept for its webhook at most; all attempts take a day.
local OUTBOX_MS = 172800000
local GROUP = 'deliverers'
-- Only the age of a pending entry matters, so all deliverers share one consumer.
local CONSUMER = 'api'

-- Adds a webhook that is due. The group is created with the stream, so it covers every entry.
local function add_to_outbox(id)
  if call('EXISTS', K.outbox) == 0 then
    call('XGROUP', 'CREATE', K.outbox, GROUP, '0', 'MKSTREAM')
  end
  call('XADD', K.outbox, '*', 'id', id)
  call('PEXPIRE', K.outbox, OUTBOX_MS)
end

-- Returns whether a deliverer still had the entry.
local function remove_from_outbox(entry)
  local had = call('EXISTS', K.outbox) == 1 and call('XACK', K.outbox, GROUP, entry) == 1
  call('XDEL', K.outbox, entry)
  return had
end
