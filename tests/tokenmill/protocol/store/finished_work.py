"""Creates finished tasks of all kinds through the store."""

from collections.abc import Iterator

from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.tasks import SLUG, fetch, settle, submit
from tokenmill.protocol.records import Claimed
from tokenmill.protocol.store.readers import Readers
from tokenmill.protocol.store.task_store import TaskStore

BATCH = 100
NUM_TENANTS = 50
REASONS = ("stop", "length", "error", "timeout")


def finish_many(client: RedisClient, num_tasks: int, retention_seconds: float) -> Iterator[int]:
    """End `num_tasks` tasks of several tenants and classes in every possible way. Yields after each hundred
    how many have ended. Renews leases and tidies registries as workers do.
    """
    store = TaskStore(client, retention_seconds=retention_seconds)
    readers = Readers(client, retention_seconds=retention_seconds)
    for first in range(0, num_tasks, BATCH):
        task_ids = [_submit(store, client, number) for number in range(first, first + BATCH)]
        readers.read(task_ids[0], "a reader", 60)
        store.cancel(task_ids[0])
        fetch(client, task_ids[1]).cancel()
        fetch(client, task_ids[2]).delete()
        claimed = store.claim(SLUG, worker="w", max_tasks=BATCH, lease_seconds=60)
        store.hand_back({one.task_id: one.owner for one in claimed[:5]})
        _end(store, claimed[5:])
        _end(store, store.claim(SLUG, worker="w", max_tasks=BATCH, lease_seconds=60))
        store.reap(SLUG, max_task_seconds=3600)
        yield first + BATCH


def _submit(store: TaskStore, client: RedisClient, number: int) -> str:
    return submit(
        store,
        client,
        priority=number % 5,
        tenant=f"tenant {number % NUM_TENANTS}",
        idempotency_key=str(number) if number % 3 == 0 else None,
        cancel_on_disconnect=number % BATCH == 0,
    )


def _end(store: TaskStore, claimed: list[Claimed]) -> None:
    for number, one in enumerate(claimed):
        settle(store, one, 0, 3, reason=REASONS[number % len(REASONS)])
