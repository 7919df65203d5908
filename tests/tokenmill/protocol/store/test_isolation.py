"""A record that a script cannot process is reported and set aside; other records and other duties are not
affected.
"""

from collections.abc import Callable

import pytest
import redis

from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.passing_time import accept_earlier
from tests.tokenmill.protocol.store.tasks import (
    SLUG,
    claim,
    claim_one,
    final_write,
    owned,
    publish,
    reap,
    settle,
    submission,
    submit,
)
from tokenmill.protocol import keys
from tokenmill.protocol.limits import TimeLimits
from tokenmill.protocol.records import Accepted, Lost
from tokenmill.protocol.store.task_store import TaskStore

Spoil = Callable[[RedisClient, str], object]


def _wrong_log(client: RedisClient, task_id: str) -> None:
    client.delete(keys.log(task_id))
    client.set(keys.log(task_id), "x")


def _no_cost(client: RedisClient, task_id: str) -> None:
    client.hset(keys.run(task_id), "cost", "many")


def _no_acceptance(client: RedisClient, task_id: str) -> None:
    client.hdel(keys.run(task_id), "accepted_us")


def _wrong_job(client: RedisClient, task_id: str) -> None:
    client.delete(f"rq:job:{task_id}")
    client.sadd(f"rq:job:{task_id}", "x")


SPOILS = [_wrong_log, _no_cost, _no_acceptance, _wrong_job]
each_spoil = pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__)


@each_spoil
def test_a_bad_record_does_not_keep_lapsed_tasks_claimed(
    store: TaskStore, redis_client: RedisClient, spoil: Spoil
) -> None:
    ids = [submit(store, redis_client) for _ in range(5)]
    claim(store, lease_seconds=-1)
    spoil(redis_client, ids[2])
    reaped = reap(store)

    assert set(reaped.returned) == set(ids) - {ids[2]}
    named = {failure.record for failure in reaped.failures} | set(reaped.lost)
    assert named == {ids[2]}
    again = reap(store)
    assert (again.returned, again.failures) == ((), ()), "the bad record is set aside"


@each_spoil
def test_a_bad_record_blocks_neither_deadlines_nor_retention(
    store: TaskStore, redis_client: RedisClient, spoil: Spoil
) -> None:
    limits = TimeLimits(queue_timeout_seconds=5)
    bad = submit(store, redis_client, limits=limits)
    late = submit(store, redis_client, limits=limits)
    old = submit(store, redis_client)
    for task_id in (bad, late):
        redis_client.zadd(keys.deadlines(SLUG), {task_id: 1})
    accept_earlier(redis_client, old, 7200)
    spoil(redis_client, bad)
    ended = submission(redis_client)
    redis_client.zadd(keys.shown(SLUG), {ended.queue: 1})
    redis_client.zadd(f"rq:failed:{ended.queue}", {"expired": 1})
    redis_client.zadd(keys.LEASES, {bad: 1})
    reaped = reap(store)

    assert set(reaped.timed_out) == {late, old}
    assert redis_client.zscore(f"rq:failed:{ended.queue}", "expired") is None
    assert store.inspect(late).status == "failed"  # type: ignore[union-attr]


def test_more_bad_records_than_one_call_processes_block_no_deadline(
    store: TaskStore, redis_client: RedisClient
) -> None:
    limits = TimeLimits(queue_timeout_seconds=5)
    bad = [submit(store, redis_client, limits=limits) for _ in range(150)]
    late = submit(store, redis_client, limits=limits)
    redis_client.zadd(keys.deadlines(SLUG), dict.fromkeys(bad, 1) | {late: 2})
    for task_id in bad:
        _no_cost(redis_client, task_id)
    reaped = [reap(store) for _ in range(2)]

    assert [len(one.failures) for one in reaped] == [100, 50]
    assert reaped[1].timed_out == (late,)


def test_a_broken_index_fails_only_its_own_duty(store: TaskStore, redis_client: RedisClient) -> None:
    """The script of the duty fails as a whole, which is a failure of that duty."""
    submit(store, redis_client)
    lapsed = claim_one(store, lease_seconds=-1)
    redis_client.hset(keys.sweep(SLUG), "x", "y")
    reaped = reap(store)

    assert reaped.returned == (lapsed.task_id,)
    assert [failure.duty for failure in reaped.failures] == ["strays"]


def test_other_tasks_are_renewed_beside_a_bad_record(store: TaskStore, redis_client: RedisClient) -> None:
    ids = [submit(store, redis_client) for _ in range(3)]
    held = claim(store)
    redis_client.zadd(keys.LEASES, dict.fromkeys(ids, 1))
    _wrong_job(redis_client, ids[1])
    renewed = store.renew(owned(held), 60)

    assert (renewed.lost, renewed.cancelled) == (frozenset(), frozenset())
    assert [redis_client.zscore(keys.LEASES, one) > 1 for one in ids] == [True, False, True]


def test_other_tasks_are_handed_back_beside_a_bad_record(store: TaskStore, redis_client: RedisClient) -> None:
    ids = [submit(store, redis_client) for _ in range(3)]
    held = claim(store)
    _no_cost(redis_client, ids[1])

    assert store.hand_back(owned(held)) == 2
    assert [one.task_id for one in claim(store)] == [ids[0], ids[2]]


def test_other_tokens_are_stored_beside_a_bad_record(store: TaskStore, redis_client: RedisClient) -> None:
    ids = [submit(store, redis_client) for _ in range(3)]
    held = claim(store)
    redis_client.delete(keys.run(ids[1]))
    redis_client.set(keys.run(ids[1]), "x")
    outcomes = store.publish([final_write(one, 0, 2) for one in held])

    assert outcomes == [Accepted(), Lost(), Accepted()]
    assert [store.inspect(one).status for one in (ids[0], ids[2])] == ["completed"] * 2  # type: ignore[union-attr]


def test_an_error_of_the_server_is_not_a_failure_of_a_record(
    store: TaskStore, redis_client: RedisClient
) -> None:
    """MISCONF, READONLY and similar errors are raised to the caller."""
    submit(store, redis_client)
    redis_client.replicaof("127.0.0.1", "1")
    try:
        with pytest.raises(redis.exceptions.ReadOnlyError):
            reap(store)
    finally:
        redis_client.replicaof("NO", "ONE")


def test_a_lapsed_task_with_an_incomplete_run_hash_is_lost(
    store: TaskStore, redis_client: RedisClient
) -> None:
    """A run hash with too few fields to requeue the task."""
    submit(store, redis_client)
    held = claim_one(store, lease_seconds=-1)
    publish(store, held, 0, 2)
    redis_client.hdel(keys.run(held.task_id), "queue")
    assert reap(store).lost == (held.task_id,)
    end = store.read_log(held.task_id)[-1]
    assert end.error["code"] == "lost"  # type: ignore[union-attr,index]
    assert settle(store, held, 2) == Lost()


def test_a_task_without_the_name_of_its_worker_can_be_cancelled(
    store: TaskStore, redis_client: RedisClient
) -> None:
    """Regression: the script failed after it had written the end to the log."""
    task_id = submit(store, redis_client)
    claim_one(store)
    redis_client.hdel(keys.run(task_id), "worker")
    assert store.cancel(task_id) == "cancelled"
    assert store.inspect(task_id).status == "cancelled"  # type: ignore[union-attr]
    assert not redis_client.exists(keys.LEASES)


@pytest.mark.parametrize("damage", ["lost", "overwritten"])
@pytest.mark.parametrize("field", ["accepted_us", "priority"])
def test_a_waiting_task_that_lost_a_field_is_claimed(
    store: TaskStore, redis_client: RedisClient, field: str, damage: str
) -> None:
    """Its queue has the value too. Before, the script failed after its first writes."""
    first, second = submit(store, redis_client, priority=1), submit(store, redis_client, priority=1)
    before = redis_client.hget(keys.run(first), field)
    if damage == "lost":
        redis_client.hdel(keys.run(first), field)
    else:
        redis_client.hset(keys.run(first), field, "soon")
    claimed = claim(store)
    assert [one.task_id for one in claimed] == [first, second]
    assert claimed[0].priority == 1
    assert redis_client.hget(keys.run(first), field) == before
    for one in claimed:
        settle(store, one)
