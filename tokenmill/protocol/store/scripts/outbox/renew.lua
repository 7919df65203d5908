-- Resets the idle time of webhooks that a deliverer has taken. ARGV: retention, entries.

if call('EXISTS', K.outbox) == 1 then
  -- Only of pending entries; acknowledged ones stay so.
  local arguments = { unpack(ARGV, 2) }
  arguments[#arguments + 1] = 'JUSTID'
  call('XCLAIM', K.outbox, GROUP, CONSUMER, 0, unpack(arguments))
end
