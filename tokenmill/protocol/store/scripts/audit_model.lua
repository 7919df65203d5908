-- Builds the lines, sums and counters of a model again if a script noted damage or they do not fit its orders.
-- ARGV: retention, slug. Gives 1 if they were built again.

local slug = ARGV[2]
ensure_model(slug)

local function fits()
  local num_tasks, num_lines = 0, 0
  for _, queue in ipairs(call('ZRANGE', K.shown .. slug, 0, -1)) do
    ensure_queue(slug, queue)
    local count = call('ZCARD', K.order .. queue)
    num_tasks = num_tasks + count
    if count > 0 then
      num_lines = num_lines + 1
      local has_sums = call('HLEN', K.cost .. queue) > count
      if not is_lined_up(queue, slug) or not has_sums then
        return false
      end
    end
  end
  local num_of_tenants = 0
  for name, count in pairs(hash(K.tenants .. slug)) do
    num_of_tenants = num_of_tenants + (string.find(name, 'tasks:', 1, true) == 1 and tonumber(count) or 0)
  end
  return num_tasks == num_of_tenants and num_tasks == (all_waiting(slug)) and num_lines == call('ZCARD', K.queues .. slug)
end

local is_sound = fits()
if is_sound and call('SISMEMBER', K.damaged, slug) == 0 then
  return 0
end
line_up_again(slug)
count_again(slug)
call('SREM', K.damaged, slug)
return 1
