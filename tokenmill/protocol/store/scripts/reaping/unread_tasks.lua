-- Cancels tasks whose readers lapsed, as they do when their server dies. ARGV: retention, maximum number of tasks.
-- Returns {ids cancelled}, {id, reason of each failure}.

local cancelled = {}
process_due(K.watched, tonumber(ARGV[2]), function(id)
  if cancel_if_unread(id) then
    cancelled[#cancelled + 1] = id
  end
end)
return { cancelled, failures }
