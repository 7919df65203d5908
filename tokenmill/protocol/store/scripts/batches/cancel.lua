-- Requests the end of a batch. Its runner ends it. ARGV: retention, id. Returns its hash; without effect on a batch
-- that has ended.

local id = ARGV[2]
local owner = call('HGET', K.batch .. id, 'owner')
if call('ZSCORE', K.batches, id) then
  call('HSETNX', K.batch .. id, 'cancelling_at', seconds(now_us))
  if owner == '' then
    call('ZADD', K.batches, seconds(now_us), id)
  end
end
return call('HGETALL', K.batch .. id)
