"""Lets time pass for waiting tasks. Tests cannot set Redis's clock, so the times that scripts compare with it
are moved into the past.
"""

from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.tasks import SLUG
from tokenmill.protocol import keys
from tokenmill.protocol.store import scripting

_ACCEPT_EARLIER = """
local slug, id, us = ARGV[2], ARGV[3], ARGV[4]
local queue = call('HGET', K.run .. id, 'queue')
dequeue(queue, slug, id)
call('HINCRBY', K.run .. id, 'accepted_us', -us)
enqueue(id, hash(K.run .. id))
"""
_LET_PASS = """
local slug, us = ARGV[2], ARGV[3]
for _, queue in ipairs(call('ZRANGE', K.queues .. slug, 0, -1)) do
  local served = call('ZSCORE', K.unserved .. slug, queue)
  for _, id in ipairs(call('ZRANGE', K.order .. queue, 0, -1)) do
    local accepted_us, cost = call('ZSCORE', K.order .. queue, id), call('HGET', K.cost .. queue, id)
    add_to_sums(queue, tonumber(accepted_us), -cost)
    add_to_sums(queue, accepted_us - us, tonumber(cost))
    call('HINCRBY', K.run .. id, 'accepted_us', -us)
    call('ZINCRBY', K.order .. queue, -us, id)
  end
  update_index(queue, slug)
  call('ZADD', K.unserved .. slug, whole(served - us), queue)
end
local mark = call('HGET', K.pace .. slug, 'mark')
if mark then
  call('HSET', K.pace .. slug, 'mark', whole(mark - us))
end
"""


def accept_earlier(client: RedisClient, task_id: str, seconds: float) -> None:
    """As if a waiting task had been accepted this much earlier."""
    client.eval(
        scripting.build(scripting.QUEUE_PARTS, _ACCEPT_EARLIER), 0, 1, SLUG, task_id, round(seconds * 1e6)
    )


def let_pass(client: RedisClient, seconds: float) -> None:
    """As if all waiting tasks, and the queues since their last claim, had waited this much longer."""
    script = scripting.build(scripting.QUEUE_PARTS, _LET_PASS)
    client.eval(script, 0, 1, SLUG, round(seconds * 1e6))


def measured(client: RedisClient, slug: str, rate: float) -> None:
    """As if the workers of a model had been measured to process this many tokens per second."""
    fields = {"tokens": f"{10 * rate:.6f}", "us": "10000000", "known": "1"}
    client.hset(keys.pace(slug), mapping=fields)
