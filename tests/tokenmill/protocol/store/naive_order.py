"""The order of claims in plain Python, computed anew from every waiting task. Tokens served and the last
claim of each queue are read from Redis, as other tests check them.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.tasks import SLUG
from tokenmill.protocol import keys
from tokenmill.protocol.claim_order import ClaimOrder
from tokenmill.protocol.naming import queue_name, tenant_hash

PROMOTED = -1


@dataclass(frozen=True)
class WaitingTask:
    task_id: str
    tenant: str
    priority: int
    cost: int
    accepted_us: int

    @property
    def queue(self) -> str:
        return queue_name(SLUG, self.priority, self.tenant)


def waiting_tasks(client: RedisClient, task_ids: Iterable[str]) -> list[WaitingTask]:
    fields = ("tenant", "priority", "cost", "accepted_us")
    tasks = []
    for task_id in task_ids:
        tenant, priority, cost, accepted_us = client.hmget(keys.run(task_id), fields)
        tasks.append(WaitingTask(task_id, tenant.decode(), int(priority), int(cost), int(accepted_us)))
    return tasks


def now_us(client: RedisClient) -> int:
    seconds, microseconds = client.time()
    return int(seconds * 1_000_000 + microseconds)


def counts_as(task: WaitingTask, order: ClaimOrder, now: int) -> int:
    waited = (now - task.accepted_us) / 1e6
    if order.max_waiting_seconds is not None and waited >= order.max_waiting_seconds:
        return PROMOTED
    gained = 0 if order.ageing_seconds is None else int(waited / order.ageing_seconds)
    return min(task.priority, max(0, task.priority - gained))


def by_age(tasks: Iterable[WaitingTask], order: ClaimOrder, now: int) -> list[WaitingTask]:
    """The order of the tasks of one tenant, or of all without fair sharing."""
    return sorted(tasks, key=lambda task: (counts_as(task, order, now), task.accepted_us))


def next_task(client: RedisClient, tasks: list[WaitingTask], order: ClaimOrder) -> WaitingTask:
    """The task that is claimed next. `tasks`: all waiting ones, at least one."""
    now = now_us(client)
    if not order.fair_sharing or len({task.tenant for task in tasks}) == 1:
        return by_age(tasks, order, now)[0]
    counters = {
        task.tenant: client.zscore(keys.shares(SLUG), tenant_hash(task.tenant)) or 0.0 for task in tasks
    }
    best = min(counts_as(task, order, now) for task in tasks)
    candidates = [task for task in tasks if counts_as(task, order, now) == best]
    if best == PROMOTED:
        unserved = {task.queue: client.zscore(keys.unserved(SLUG), task.queue) for task in candidates}
        aged = min(candidates, key=lambda task: (unserved[task.queue], task.queue, task.accepted_us))
    else:
        aged = min(candidates, key=lambda task: (counters[task.tenant], task.accepted_us))
    plain = min(tasks, key=lambda task: (task.priority, counters[task.tenant], task.accepted_us))
    is_turn_of_plain = client.hget(keys.rule(SLUG), "turn") == b"age"
    return plain if is_turn_of_plain and counters[plain.tenant] < counters[aged.tenant] else aged
