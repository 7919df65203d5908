"""Whatever index is deleted or overwritten, every accepted task is claimed and ends, and an audit restores
all counts. No script raises an error in between.
"""

from collections.abc import Callable

import pytest

from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.naive_order import by_age, now_us, waiting_tasks
from tests.tokenmill.protocol.store.tasks import SLUG, claim, claim_one, reap, settle, submission, submit
from tokenmill.protocol import keys, rq_keys
from tokenmill.protocol.claim_order import DEFAULT_ORDER
from tokenmill.protocol.naming import queue_name
from tokenmill.protocol.store.audit import Audit
from tokenmill.protocol.store.outbox import Outbox
from tokenmill.protocol.store.task_store import TaskStore

QUEUE = queue_name(SLUG, 2, "a")
OF_CLASS = f"{SLUG}:2"
INDEXES = (
    keys.order(QUEUE), keys.cost(QUEUE), keys.queues(SLUG), keys.lines(OF_CLASS), keys.heads(OF_CLASS),
    keys.unserved(SLUG), keys.shares(SLUG), keys.away(SLUG), keys.waiting(SLUG), keys.tenants(SLUG),
    keys.shown(SLUG), keys.deadlines(SLUG), keys.totals(SLUG), keys.pace(SLUG), keys.rule(SLUG),
    keys.clock(SLUG), keys.LEASES, keys.WATCHED, keys.OUTBOX, keys.OUTBOX_DUE, keys.DAMAGED,
    rq_keys.QUEUES, rq_keys.queue(QUEUE), rq_keys.wip(QUEUE), rq_keys.finished(QUEUE),
    rq_keys.canceled(QUEUE),
)  # fmt: skip

Damage = Callable[[RedisClient, str], object]


def delete(client: RedisClient, key: str) -> None:
    client.delete(key)


def overwrite(client: RedisClient, key: str) -> None:
    """Replace it by a type that no index has."""
    client.delete(key)
    client.setbit(key, 7, 1) if key != keys.clock(SLUG) else client.rpush(key, "x")


def audit(client: RedisClient) -> int:
    return Audit(client).run()


def end_all(store: TaskStore) -> set[str]:
    ended = set()
    while claimed := claim(store, 2):
        for one in claimed:
            settle(store, one, 0, 1)
            ended.add(one.task_id)
    return ended


@pytest.fixture
def waiting(store: TaskStore, redis_client: RedisClient) -> list[str]:
    """Waiting tasks of two tenants and classes, a claimed one and an ended one."""
    for _ in range(2):
        submit(store, redis_client, tenant="a", webhook="http://h.example/")
    settle(store, claim_one(store), 0, 1)
    claim_one(store)
    ids = [submit(store, redis_client, tenant="a", cost=cost) for cost in (10, 200, 3000)]
    ids.append(submit(store, redis_client, tenant="b", cost=7))
    ids.append(submit(store, redis_client, tenant="a", priority=3, cost=9))
    return ids


@pytest.mark.parametrize("damage", [delete, overwrite])
@pytest.mark.parametrize("key", INDEXES)
def test_every_task_ends_although_an_index_is_damaged(
    store: TaskStore, redis_client: RedisClient, waiting: list[str], key: str, damage: Damage
) -> None:
    """The damage, then the usual calls, then an audit: nothing is lost at any point."""
    damage(redis_client, key)
    early = claim(store, 1)
    new = submit(store, redis_client, tenant="a")
    store.cancel(waiting[1])
    reap(store)
    audit(redis_client)
    ended = end_all(store)
    expected = {*waiting, new} - {waiting[1]} - {one.task_id for one in early}
    assert ended == expected
    cancelled = store.inspect(waiting[1])
    assert cancelled is not None
    assert cancelled.status == "cancelled"
    assert store.queue_stats(SLUG).waiting_cost == 0


@pytest.mark.parametrize("damage", [delete, overwrite])
@pytest.mark.parametrize("key", INDEXES)
def test_an_audit_restores_order_positions_and_counts(
    store: TaskStore, redis_client: RedisClient, waiting: list[str], key: str, damage: Damage
) -> None:
    claimed_before = redis_client.zcard(keys.LEASES)
    damage(redis_client, key)
    # A script that writes detects a wrong type; otherwise the audit does.
    audit(redis_client)
    assert redis_client.zcard(keys.LEASES) == claimed_before
    tasks = waiting_tasks(redis_client, waiting)
    assert store.queue_stats(SLUG).waiting_cost == sum(task.cost for task in tasks)
    own = by_age([task for task in tasks if task.tenant == "a"], DEFAULT_ORDER, now_us(redis_client))
    store.cancel(waiting[3])
    for position, task in enumerate(own):
        snapshot = store.inspect(task.task_id)
        assert snapshot is not None
        assert (snapshot.position, snapshot.tokens_ahead) == (
            position,
            sum(one.cost for one in own[:position]),
        )
    assert audit(redis_client) == 0


def test_an_intact_database_is_unchanged(
    store: TaskStore, redis_client: RedisClient, waiting: list[str]
) -> None:
    assert audit(redis_client) == 0


def test_all_indexes_may_be_damaged_at_once(
    store: TaskStore, redis_client: RedisClient, waiting: list[str]
) -> None:
    kept = (keys.run(""), keys.log(""), rq_keys.job(""))
    for key in list(redis_client.scan_iter()):
        if not key.decode().startswith(kept):
            redis_client.delete(key)
    assert claim(store) == []
    audit(redis_client)
    assert end_all(store) == set(waiting)
    assert len(Outbox(redis_client).take(10, silence_seconds=60)) == 1


def test_a_run_hash_of_another_type_does_not_affect_other_tasks(
    store: TaskStore, redis_client: RedisClient, waiting: list[str]
) -> None:
    for key in (keys.run(waiting[0]), keys.log(waiting[2]), rq_keys.results(waiting[3])):
        overwrite(redis_client, key)
    audit(redis_client)
    assert end_all(store) == set(waiting[1:])


def test_a_log_of_another_type_does_not_prevent_other_writes(
    store: TaskStore, redis_client: RedisClient
) -> None:
    ids = [submit(store, redis_client) for _ in range(2)]
    claimed = claim(store)
    overwrite(redis_client, keys.log(ids[0]))
    for one in claimed:
        settle(store, one, 0, 1)
    snapshot = store.inspect(ids[1])
    assert snapshot is not None
    assert snapshot.status == "completed"


def test_an_audit_is_due_once_per_period_and_after_damage(
    store: TaskStore, redis_client: RedisClient
) -> None:
    audits = [Audit(redis_client), Audit(redis_client)]
    assert [one.is_due(60) for one in audits] == [True, False]
    submit(store, redis_client)
    redis_client.delete(keys.cost(submission(redis_client).queue))
    claim_one(store)
    assert audits[1].is_due(60)
    audits[1].run()
    assert not audits[1].is_due(60)
