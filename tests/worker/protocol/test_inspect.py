"""What is told of a task and of the queues: positions, costs and rates that follow from the claims."""

import random

import pytest
import redis

from tests.worker.protocol.passing_time import accept_earlier
from tests.worker.protocol.tasks import (
    SLUG,
    claim,
    claim_one,
    dump,
    owned,
    publish,
    settle,
    submission,
    submit,
    unchanged,
)
from worker.protocol import keys
from worker.protocol.store import TaskSnapshot, TaskStore, WorkerRecord


def inspect(store: TaskStore, task_id: str) -> TaskSnapshot:
    snapshot = store.inspect(task_id)
    assert snapshot is not None
    return snapshot


def put_ready(store: TaskStore) -> None:
    record = WorkerRecord(name="w", model="m", slug=SLUG, state="ready", started_at=0.0)
    store.put_worker(record, ttl_seconds=60)


def test_an_unknown_task_is_none(store: TaskStore, redis_client: redis.Redis) -> None:
    assert unchanged(redis_client, lambda: store.inspect("0" * 32)) is None
    assert store.read_log("0" * 32) == []


def test_looking_changes_nothing(store: TaskStore, redis_client: redis.Redis) -> None:
    ids = [submit(store, redis_client) for _ in range(2)]
    publish(store, claim_one(store), 0, 2)
    before = dump(redis_client)
    for task_id in ids:
        store.inspect(task_id)
    store.queue_stats(SLUG)
    store.workers()
    assert dump(redis_client) == before


def test_position_and_tokens_are_those_of_the_claim_order(
    store: TaskStore, redis_client: redis.Redis
) -> None:
    """Over the classes of one tenant: what is told must be what then happens."""
    chance = random.Random(5)
    costs = {}
    for age in range(400, 0, -10):
        cost, priority = chance.randrange(1, 100), chance.randrange(5)
        task_id = submit(store, redis_client, priority=priority, tenant="a", cost=cost)
        accept_earlier(redis_client, task_id, age)
        costs[task_id] = cost
    for claimed in claim(store, 7):
        del costs[claimed.task_id]
    told = {task_id: inspect(store, task_id) for task_id in costs}
    tokens_ahead = 0
    for position, claimed in enumerate(claim(store)):
        snapshot = told[claimed.task_id]
        assert (snapshot.position, snapshot.tokens_ahead) == (position, tokens_ahead)
        tokens_ahead += costs[claimed.task_id]


def test_one_cancelled_in_the_middle_leaves_at_most_its_own_tokens(
    store: TaskStore, redis_client: redis.Redis
) -> None:
    first, middle, third, last = (submit(store, redis_client, cost=cost) for cost in (1, 10, 100, 1000))
    store.cancel(middle)
    assert inspect(store, third).position == 1
    assert 1 <= inspect(store, third).tokens_ahead <= 1 + 10
    assert 101 <= inspect(store, last).tokens_ahead <= 111
    claim_one(store)
    assert inspect(store, third).tokens_ahead == 0
    assert inspect(store, last).tokens_ahead == 100
    assert inspect(store, first).claimed


def test_a_head_that_has_aged_counts_as_what_it_goes_before(
    store: TaskStore, redis_client: redis.Redis
) -> None:
    urgent = submit(store, redis_client, priority=1, cost=7)
    old = submit(store, redis_client, priority=4, cost=9)
    assert inspect(store, old).position == 1
    accept_earlier(redis_client, old, 300)
    assert (inspect(store, old).position, inspect(store, urgent).position) == (0, 1)
    assert inspect(store, urgent).tokens_ahead == 9


def test_why_it_waits(store: TaskStore, redis_client: redis.Redis) -> None:
    first, second = submit(store, redis_client), submit(store, redis_client)
    assert inspect(store, first).waiting_for == "worker"
    put_ready(store)
    assert inspect(store, first).num_ready_workers == 1
    assert inspect(store, first).waiting_for == "capacity"
    assert inspect(store, second).waiting_for == "behind"
    claimed = claim_one(store)
    at_worker = inspect(store, first)
    assert (at_worker.waiting_for, at_worker.position, at_worker.tokens_ahead) == ("capacity", 0, 0)
    publish(store, claimed, 0, 0, waiting_for="token_budget", position="0")
    assert (inspect(store, first).waiting_for, inspect(store, first).position) == ("token_budget", 0)


def test_a_task_that_came_back_is_told_by_rank(store: TaskStore, redis_client: redis.Redis) -> None:
    task_id = submit(store, redis_client)
    claimed = claim_one(store)
    publish(store, claimed, 0, 1, scheduled="1")
    publish(store, claimed, 1, 0, waiting_for="kv_blocks", position="5")
    store.hand_back(owned([claimed]))
    snapshot = inspect(store, task_id)
    assert (snapshot.position, snapshot.waiting_for, snapshot.claimed) == (0, "worker", False)
    # It has begun, and a status never goes back.
    assert snapshot.status == "in_progress"
    assert snapshot.num_entries == 1


def test_the_drain_rate_is_that_of_the_last_minute(store: TaskStore, redis_client: redis.Redis) -> None:
    ids = [submit(store, redis_client, cost=cost) for cost in (100, 50, 1000)]
    assert inspect(store, ids[0]).drain_rate is None
    first, second = claim(store, 2)
    settle(store, first, 0, 3)
    store.cancel(second.task_id)
    # What nobody served is not drained.
    store.cancel(ids[2])
    rate = store.queue_stats(SLUG).drain_rate
    assert rate is not None
    # 150 tokens since the bucket of the first end began, which is 10 seconds ago at least and 60 at most.
    assert 150 / 60 <= rate <= 15
    assert 0 < redis_client.pttl(keys.drained(SLUG)) <= 60_000


def test_old_buckets_are_dropped(store: TaskStore, redis_client: redis.Redis) -> None:
    bucket = redis_client.time()[0] // 10
    redis_client.hset(keys.drained(SLUG), mapping={bucket - 7: 10**9, bucket - 6: 10**9, bucket - 3: 60})
    rate = store.queue_stats(SLUG).drain_rate
    assert rate is not None
    assert 60 / 60 <= rate <= 60 / 30
    submit(store, redis_client, cost=1)
    settle(store, claim_one(store))
    kept = {int(field) for field in redis_client.hkeys(keys.drained(SLUG))}
    assert kept.isdisjoint({bucket - 7, bucket - 6})
    assert bucket - 3 in kept


def test_stats_of_nothing(store: TaskStore) -> None:
    stats = store.queue_stats(SLUG)
    assert stats.waiting == dict.fromkeys(range(5), 0)
    assert (stats.oldest_age, stats.waiting_cost, stats.claimed, stats.totals) == (0.0, 0, 0, {})
    assert (stats.drain_rate, stats.num_ready_workers) == (None, 0)


def test_stats_count_classes_over_tenants(store: TaskStore, redis_client: redis.Redis) -> None:
    for priority, tenant in ((0, "a"), (2, "a"), (2, "b"), (4, "b"), (2, "a")):
        submit(store, redis_client, priority=priority, tenant=tenant, cost=10)
    claim(store, 2)
    put_ready(store)
    stats = store.queue_stats(SLUG)
    assert stats.waiting == {0: 0, 1: 0, 2: 2, 3: 0, 4: 1}
    assert (stats.waiting_cost, stats.claimed, stats.num_ready_workers) == (30, 2, 1)
    assert stats.oldest_age > 0
    assert stats.totals == {"submitted": 5}


def test_costs_are_forgotten_with_the_queue(store: TaskStore, redis_client: redis.Redis) -> None:
    given = submission(redis_client, cost=10)
    store.submit(given)
    claimed = claim_one(store)
    assert not redis_client.exists(keys.cost(given.queue))
    later = submit(store, redis_client, cost=5)
    store.hand_back(owned([claimed]))
    assert (inspect(store, given.task_id).tokens_ahead, inspect(store, later).tokens_ahead) == (0, 10)
    assert store.queue_stats(SLUG).waiting_cost == 15


@pytest.mark.parametrize("after", [-5, -1, 0, 3, 4, 2**53, 2**70])
def test_a_log_is_read_from_any_place(store: TaskStore, redis_client: redis.Redis, after: int) -> None:
    task_id = submit(store, redis_client)
    publish(store, claim_one(store), 0, 5)
    expected = [seq for seq in range(5) if seq > after]
    assert [event.seq for event in store.read_log(task_id, after)] == expected
