-- Stores the record of a file whose content is stored. ARGV: retention, id, tenant, purpose, expiry (seconds), record.

local id, tenant, purpose, expires_at, record = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]

call('HSET', K.file .. id, 'tenant', tenant, 'purpose', purpose, 'record', record)
call('ZADD', K.files .. tenant, 0, id)
call('ZADD', K.files_expiring, expires_at, id)
return 1
