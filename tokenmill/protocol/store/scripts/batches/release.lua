-- Returns a batch, for the same or another runner. ARGV: retention, id, owner, seconds until it may be taken.

local id, owner = ARGV[2], ARGV[3]
if call('HGET', K.batch .. id, 'owner') == owner then
  call('HSET', K.batch .. id, 'owner', '')
  call('ZADD', K.batches, seconds(now_us + ARGV[4] * 1000000), id)
end
