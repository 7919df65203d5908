-- Puts tasks back into their queues for others. ARGV: retention, id and owner of each. Gives how many.

local returned = {}
for i = 2, #ARGV, 2 do
  local id = ARGV[i]
  local task = hash(K.run .. id)
  if task.owner == ARGV[i + 1] then
    task.id = id
    if is_started(id) then
      returned[#returned + 1] = task
    else
      finish_cancelled(id, task)
    end
  end
end

-- The youngest first, so that each goes to the very front.
table.sort(returned, function(a, b)
  return tonumber(a.accepted_us) > tonumber(b.accepted_us)
end)
for _, task in ipairs(returned) do
  put_back(task.id, task)
end
return #returned
