-- A webhook is to be tried again later. Nothing is done if another deliverer has it by now.
-- ARGV: retention, entry, id, seconds, '1' if this was a try.

local entry, id = ARGV[2], ARGV[3]
if take_off(entry) and call('HEXISTS', K.run .. id, 'webhook') == 1 then
  call('ZADD', K.outbox_due, seconds(now_us + ARGV[4] * 1000000), id)
  call('PEXPIRE', K.outbox_due, OUTBOX_MS)
  if ARGV[5] == '1' then
    call('HINCRBY', K.run .. id, 'webhook_tries', 1)
  end
end
