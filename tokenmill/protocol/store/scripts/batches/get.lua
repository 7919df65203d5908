-- A file or a batch. ARGV: retention, 'file', 'batch' or 'segments', id. Returns its hash, or its list.

if ARGV[2] == 'segments' then
  return call('LRANGE', K.batch_segments .. ARGV[3], 0, -1)
end
return call('HGETALL', K[ARGV[2]] .. ARGV[3])
