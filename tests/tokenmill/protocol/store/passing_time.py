"""Time that passes for waiting tasks without anybody waiting for it.

Scripts read Redis's clock, which no test can turn: what they compare it with is moved into the past.
"""

import redis

from tests.tokenmill.protocol.store.tasks import SLUG
from tokenmill.protocol import keys
from tokenmill.protocol.store import scripting

_PARTS = "\n".join(["#!lua", scripting._key_names(), *map(scripting._read, scripting._ORDER)])
_ACCEPT_EARLIER = """
local slug, id, us = ARGV[2], ARGV[3], ARGV[4]
local queue = call('HGET', K.run .. id, 'queue')
leave(queue, slug, id)
call('HINCRBY', K.run .. id, 'accepted_us', -us)
enter(id, hash(K.run .. id))
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
  line_up(queue, slug)
  call('ZADD', K.unserved .. slug, whole(served - us), queue)
end
local mark = call('HGET', K.pace .. slug, 'mark')
if mark then
  call('HSET', K.pace .. slug, 'mark', whole(mark - us))
end
"""


def accept_earlier(client: redis.Redis, task_id: str, seconds: float) -> None:
    """As if a waiting task had been accepted so much earlier."""
    client.eval(_PARTS + _ACCEPT_EARLIER, 0, 1, SLUG, task_id, round(seconds * 1e6))


def let_pass(client: redis.Redis, seconds: float) -> None:
    """As if all that waits had waited so much longer, and no line had been served for so much longer."""
    client.eval(_PARTS + _LET_PASS, 0, 1, SLUG, round(seconds * 1e6))


def measured(client: redis.Redis, slug: str, rate: float) -> None:
    """As if a model's workers had been seen to get this many tokens per second done."""
    fields = {"tokens": f"{10 * rate:.6f}", "us": "10000000", "known": "1"}
    client.hset(keys.pace(slug), mapping=fields)
