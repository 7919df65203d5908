-- Drops expired jobs from RQ's registries. RQ does so only when they are read, and never for cancelled jobs. ARGV:
-- retention, slug. Returns {queue, reason of each failure}.

local slug = ARGV[2]

local function tidy(queue)
  local left = call('LLEN', K.rq_queue .. queue) + call('ZCARD', K.rq_wip .. queue)
  for _, registry in ipairs({ K.rq_finished, K.rq_failed, K.rq_canceled }) do
    call('ZREMRANGEBYSCORE', registry .. queue, '-inf', seconds(now_us))
    left = left + call('ZCARD', registry .. queue)
  end
  if left == 0 then
    call('SREM', K.rq_queues, K.rq_queue .. queue)
    call('ZREM', K.shown .. slug, queue)
  else
    call('ZADD', K.shown .. slug, next_tidying(now_us), queue)
  end
end

process_due(K.shown .. slug, -1, tidy)
return failures
