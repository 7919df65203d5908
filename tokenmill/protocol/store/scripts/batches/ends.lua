-- How tasks have ended. ARGV: retention, ids. Returns for each its final status, '' while it has none, or 'lost' if
-- there is no such task.

local ends = {}
for i = 2, #ARGV do
  local queue, terminal = unpack(call('HMGET', K.run .. ARGV[i], 'queue', 'terminal'))
  ends[i - 1] = queue and (terminal or '') or 'lost'
end
return ends
