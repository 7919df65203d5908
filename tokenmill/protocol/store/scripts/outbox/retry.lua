-- Schedules another attempt for a webhook; no effect if another deliverer has taken it. ARGV: retention, entry, id,
-- delay in seconds, '1' to count a failed attempt, status of its reply or '', its error.

local entry, id = ARGV[2], ARGV[3]
if remove_from_outbox(entry) and call('HEXISTS', K.run .. id, 'webhook') == 1 then
  call('ZADD', K.outbox_due, seconds(now_us + ARGV[4] * 1000000), id)
  call('PEXPIRE', K.outbox_due, OUTBOX_MS)
  if ARGV[5] == '1' then
    call('HINCRBY', K.run .. id, 'webhook_tries', 1)
    call('HSET', K.run .. id, 'webhook_status', ARGV[6], 'webhook_error', ARGV[7])
  end
end
