-- Ends a batch. ARGV: retention, id, owner, seconds for which it is kept, names and values of its last fields. Returns
-- 1, or 0 if the runner has lost the batch.

local id, owner = ARGV[2], ARGV[3]
local key = K.batch .. id
local its_owner, tenant, input = unpack(call('HMGET', key, 'owner', 'tenant', 'input'))
if its_owner ~= owner then
  return 0
end
call('HSET', key, 'owner', '', unpack(ARGV, 5))
call('ZREM', K.batches, id)
call('SREM', K.open_batches .. tenant, id)
if call('EXISTS', K.file .. input) == 1 then
  call('HINCRBY', K.file .. input, 'uses', -1)
end
call('DEL', K.batch_lines .. id, K.batch_segments .. id)
call('PEXPIRE', key, whole(ARGV[4] * 1000))
return 1
