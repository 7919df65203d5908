-- Records progress and renews the lease. ARGV: retention, id, owner, duration of the lease in seconds, completed and
-- failed lines to be added, number of fields, their names and values, number of segments, the segments, then the
-- numbers of the lines that they have. Returns nil if the runner has lost the batch, else {'1' if it is to be
-- cancelled, batches that wait for a runner}.

local id, owner, lease_seconds = ARGV[2], ARGV[3], tonumber(ARGV[4])
local key = K.batch .. id
if call('HGET', key, 'owner') ~= owner then
  return false
end
local next_argument = 8
for _ = 1, tonumber(ARGV[7]) do
  call('HSET', key, ARGV[next_argument], ARGV[next_argument + 1])
  next_argument = next_argument + 2
end
local num_segments = tonumber(ARGV[next_argument])
for i = next_argument + 1, next_argument + num_segments do
  call('RPUSH', K.batch_segments .. id, ARGV[i])
end
for i = next_argument + num_segments + 1, #ARGV do
  call('SETBIT', K.batch_lines .. id, ARGV[i], 1)
end
call('HINCRBY', key, 'completed', ARGV[5])
call('HINCRBY', key, 'failed', ARGV[6])
call('ZADD', K.batches, seconds(now_us + lease_seconds * 1000000), id)
return { call('HEXISTS', key, 'cancelling_at'), call('ZCOUNT', K.batches, '-inf', seconds(now_us)) }
