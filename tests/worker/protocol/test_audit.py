"""Whatever index is deleted or overwritten, each acknowledged task still ends."""

from collections.abc import Callable

import pytest
import redis

from tests.worker.protocol.tasks import SLUG, claim, reap, settle, submit
from worker.protocol import keys
from worker.protocol.audit import Audit
from worker.protocol.naming import queue_name
from worker.protocol.store import TaskStore

QUEUE = queue_name(SLUG, 2, "default")
OTHER = queue_name(SLUG, 4, "other")
INDEXES = {
    "queues": keys.queues(SLUG),
    "lines": f"{keys.lines(SLUG)}:2",
    "heads": f"{keys.heads(SLUG)}:2",
    "unserved": keys.unserved(SLUG),
    "shares": keys.shares(SLUG),
    "waiting": keys.waiting(SLUG),
    "tenants": keys.tenants(SLUG),
    "shown": keys.shown(SLUG),
    "order": keys.order(QUEUE),
    "cost": keys.cost(QUEUE),
    "deadlines": keys.deadlines(SLUG),
    "pace": keys.pace(SLUG),
    "rule": keys.rule(SLUG),
    "leases": keys.LEASES,
    "clock": keys.clock(SLUG),
}


def delete(client: redis.Redis, key: str) -> None:
    client.delete(key)


def overwrite(client: redis.Redis, key: str) -> None:
    client.delete(key)
    client.lpush(key, "x")


@pytest.mark.parametrize("damage", [delete, overwrite])
@pytest.mark.parametrize("name", INDEXES)
def test_every_acknowledged_task_ends(
    store: TaskStore, redis_client: redis.Redis, name: str, damage: Callable[[redis.Redis, str], None]
) -> None:
    submitted = [submit(store, redis_client) for _ in range(3)]
    submitted += [submit(store, redis_client, tenant="other", priority=4) for _ in range(2)]
    owned = claim(store, 1)
    damage(redis_client, INDEXES[name])

    submitted.append(submit(store, redis_client))
    audit = Audit(redis_client)
    audit.run()
    # A claim that has lost its lease gets one, and its owner lives.
    for one in owned:
        settle(store, one)
    while claimed := claim(store, 2):
        for one in claimed:
            settle(store, one)
        reap(store)

    ends = {task_id: snapshot.status for task_id in submitted if (snapshot := store.inspect(task_id))}
    assert ends == dict.fromkeys(submitted, "completed")
    assert store.queue_stats(SLUG).waiting_cost == 0
    # What a script noted in between is repaired now.
    audit.run()
    assert audit.run() == 0, "nothing is left to repair"


def test_an_audit_of_sound_indexes_changes_nothing(store: TaskStore, redis_client: redis.Redis) -> None:
    ids = [submit(store, redis_client) for _ in range(3)]
    claim(store, 1)
    before = {key: redis_client.dump(key) for key in redis_client.keys("*")}

    assert Audit(redis_client).run() == 0

    assert {key: redis_client.dump(key) for key in redis_client.keys("*")} == before
    assert len(ids) == 3


def test_one_process_audits_in_each_period_and_any_after_damage(redis_client: redis.Redis) -> None:
    first, second = Audit(redis_client), Audit(redis_client)
    assert (first.is_due(60), second.is_due(60)) == (True, False)
    redis_client.sadd(keys.DAMAGED, SLUG)
    assert second.is_due(60)
