-- Keeps webhooks in their deliverer's hands: counts its silence from now on. ARGV: retention, entries.

if call('EXISTS', K.outbox) == 1 then
  -- Of entries that are still held by a deliverer; those that were dealt with stay so.
  local arguments = { unpack(ARGV, 2) }
  arguments[#arguments + 1] = 'JUSTID'
  call('XCLAIM', K.outbox, GROUP, CONSUMER, 0, unpack(arguments))
end
