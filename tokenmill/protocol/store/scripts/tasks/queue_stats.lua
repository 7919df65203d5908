-- Statistics of a model's queues, O(queues). ARGV: retention, slug. Returns {class, waiting, ...}, oldest acceptance,
-- waiting cost, claimed, now, drain rate, ready workers, totals, webhooks due, webhooks to be retried (of all
-- models).

local slug = ARGV[2]
local classes, claimed = {}, 0
local _, cost = waiting_of_model(slug)
local oldest = call('ZRANGE', K.queues .. slug, 0, 0, 'WITHSCORES')[2]
for class = 0, NUM_CLASSES - 1 do
  classes[#classes + 1] = tostring(class)
  classes[#classes + 1] = waiting_of_class(slug, class)
end
for _, queue in ipairs(call('ZRANGE', K.shown .. slug, 0, -1)) do
  claimed = claimed + call('ZCARD', K.rq_wip .. queue)
end
return { classes, oldest and seconds(oldest) or false, cost, claimed, seconds(now_us), drain_rate(slug),
  num_ready_workers(slug), call('HGETALL', K.totals .. slug), call('XLEN', K.outbox), call('ZCARD', K.outbox_due) }
