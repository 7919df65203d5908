-- Rebuilds the indexes, sums and counters of a model if it is marked as damaged or they contradict its queues. ARGV:
-- retention, slug. Returns 1 if they were rebuilt, else 0.

local slug = ARGV[2]
ensure_model_keys(slug)

local function fits()
  local num_tasks, num_queues = 0, 0
  for _, queue in ipairs(call('ZRANGE', K.shown .. slug, 0, -1)) do
    ensure_queue_keys(slug, queue)
    local count = call('ZCARD', K.order .. queue)
    num_tasks = num_tasks + count
    if count > 0 then
      num_queues = num_queues + 1
      local has_sums = call('HLEN', K.cost .. queue) > count
      if not is_indexed(queue, slug) or not has_sums then
        return false
      end
    end
  end
  local num_of_tenants = 0
  for name, count in pairs(hash(K.tenants .. slug)) do
    num_of_tenants = num_of_tenants + (string.find(name, 'tasks:', 1, true) == 1 and tonumber(count) or 0)
  end
  return num_tasks == num_of_tenants and num_tasks == (waiting_of_model(slug))
    and num_queues == call('ZCARD', K.queues .. slug)
end

local is_sound = fits()
if is_sound and call('SISMEMBER', K.damaged, slug) == 0 then
  return 0
end
rebuild_index(slug)
rebuild_counters(slug)
call('SREM', K.damaged, slug)
return 1
