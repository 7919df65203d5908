-- Numbers of a model's queues for a collector: O(queues). ARGV: retention, slug. Gives
-- {class, waiting, ...}, oldest acceptance, waiting cost, claimed, now, drain rate, ready workers, totals,
-- webhooks to be delivered now, webhooks to be tried again later (these two of all models).

local slug = ARGV[2]
local classes, oldest, cost, claimed = {}, nil, 0, 0
for _, queue in ipairs(call('SMEMBERS', K.queues .. slug)) do
  local head = head_of(queue)
  if head then
    classes[#classes + 1] = string.match(queue, ':(%d+):[^:]*$')
    classes[#classes + 1] = call('ZCARD', K.order .. queue)
    oldest = math.min(oldest or head.accepted, head.accepted)
    cost = cost + call('HGET', K.cost .. queue, ':total')
  end
end
for _, queue in ipairs(call('ZRANGE', K.shown .. slug, 0, -1)) do
  claimed = claimed + call('ZCARD', K.rq_wip .. queue)
end
return { classes, oldest and seconds(oldest) or false, cost, claimed, seconds(now_us), drain_rate(slug),
  num_ready_workers(slug), call('HGETALL', K.totals .. slug), call('XLEN', K.outbox), call('ZCARD', K.outbox_due) }
