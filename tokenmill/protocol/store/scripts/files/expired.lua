-- The ids of files that have expired, the earliest first. ARGV: retention, maximum number.

return call('ZRANGEBYSCORE', K.files_expiring, '-inf', seconds(now_us), 'LIMIT', 0, ARGV[2])
