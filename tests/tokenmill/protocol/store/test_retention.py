"""Ended tasks leave no keys."""

import time

from tests.chaos.leftovers import PERMANENT
from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.finished_work import finish_many
from tests.tokenmill.protocol.store.tasks import SLUG, reap
from tests.worker.fakes import TIMEOUT_SECONDS
from tokenmill.protocol import keys
from tokenmill.protocol.store.task_store import TaskStore

RETENTION_SECONDS = 0.5
MAX_KEPT = 10
"""Keys of a model without tasks; none belongs to a task, a tenant or a queue."""


def test_thousands_of_ended_tasks_leave_a_handful_of_keys(redis_client: RedisClient) -> None:
    """durabull#64: keys of finished work grew until Redis refused writes."""
    peak = 0
    for _ in finish_many(redis_client, 3000, RETENTION_SECONDS):
        peak = max(peak, redis_client.dbsize())
    store = TaskStore(redis_client, retention_seconds=RETENTION_SECONDS)
    assert sum(store.queue_stats(SLUG).waiting.values()) == 0
    assert peak > 300
    # Counters of tenants without waiting tasks are kept for an hour.
    assert 0 < redis_client.pttl(keys.away(SLUG)) <= 3_600_000
    redis_client.delete(keys.away(SLUG))

    def kept() -> list[str]:
        reap(store)
        return [key.decode() for key in redis_client.scan_iter(count=1000)]

    deadline = time.monotonic() + TIMEOUT_SECONDS
    while len(left := kept()) > MAX_KEPT and time.monotonic() < deadline:
        pass
    assert len(left) <= MAX_KEPT
    assert [key for key in left if not PERMANENT.fullmatch(key) and redis_client.pttl(key) == -1] == []
    assert store.queue_stats(SLUG).totals["submitted"] == 3000
