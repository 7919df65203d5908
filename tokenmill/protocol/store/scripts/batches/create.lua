-- Stores a batch. ARGV: retention, id, tenant, id of its input, limit of the tenant's batches that have not ended,
-- record. Returns 'created', 'no_file' or 'full'.

local id, tenant, input, limit, record = ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5]), ARGV[6]

-- The same call again, because its reply was lost.
if call('EXISTS', K.batch .. id) == 1 then
  return 'created'
end
if call('HGET', K.file .. input, 'tenant') ~= tenant then
  return 'no_file'
end
if call('SCARD', K.open_batches .. tenant) >= limit then
  return 'full'
end
call('HSET', K.batch .. id, 'tenant', tenant, 'record', record, 'status', 'validating', 'input', input, 'owner', '')
call('HINCRBY', K.file .. input, 'uses', 1)
call('SADD', K.open_batches .. tenant, id)
call('ZADD', K.batch_index .. tenant, 0, id)
call('ZADD', K.batches, seconds(now_us), id)
return 'created'
