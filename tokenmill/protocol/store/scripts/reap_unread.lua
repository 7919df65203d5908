-- Ends tasks that end with their last reader, and whose readers lapsed with their server.
-- ARGV: retention, number of tasks to treat at most. Returns {ids cancelled}, {id, reason of each failure}.

local cancelled = {}
treat_due(K.watched, tonumber(ARGV[2]), function(id)
  if end_unread(id) then
    cancelled[#cancelled + 1] = id
  end
end)
return { cancelled, failures }
