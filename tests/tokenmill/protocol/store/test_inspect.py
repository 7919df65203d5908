"""Snapshots of tasks and queues: positions, costs and drain rates that agree with the claims."""

import random

import pytest

from api.schemas.task_view import eta_seconds
from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.passing_time import accept_earlier, let_pass
from tests.tokenmill.protocol.store.tasks import (
    SLUG,
    claim,
    claim_one,
    dump,
    owned,
    publish,
    reap,
    settle,
    submission,
    submit,
    unchanged,
)
from tokenmill.protocol import keys
from tokenmill.protocol.records import WorkerRecord
from tokenmill.protocol.snapshots import TaskSnapshot
from tokenmill.protocol.store.task_store import TaskStore


def inspect(store: TaskStore, task_id: str) -> TaskSnapshot:
    snapshot = store.inspect(task_id)
    assert snapshot is not None
    return snapshot


def put_ready(store: TaskStore) -> None:
    record = WorkerRecord(name="w", model="m", slug=SLUG, state="ready", started_at=0.0)
    store.put_worker(record, ttl_seconds=60)


def test_an_unknown_task_is_none(store: TaskStore, redis_client: RedisClient) -> None:
    assert unchanged(redis_client, lambda: store.inspect("0" * 32)) is None
    assert store.read_log("0" * 32) == []


def test_inspecting_changes_nothing(store: TaskStore, redis_client: RedisClient) -> None:
    ids = [submit(store, redis_client) for _ in range(2)]
    publish(store, claim_one(store), 0, 2)
    before = dump(redis_client)
    for task_id in ids:
        store.inspect(task_id)
    store.queue_stats(SLUG)
    store.workers()
    assert dump(redis_client) == before


def test_positions_and_tokens_agree_with_the_claims(store: TaskStore, redis_client: RedisClient) -> None:
    """Over the classes of one tenant: exact."""
    chance = random.Random(5)
    costs = {}
    for age in range(400, 0, -10):
        cost, priority = chance.randrange(1, 100), chance.randrange(5)
        task_id = submit(store, redis_client, priority=priority, tenant="a", cost=cost)
        accept_earlier(redis_client, task_id, age)
        costs[task_id] = cost
    for claimed in claim(store, 7):
        del costs[claimed.task_id]
    snapshots = {task_id: inspect(store, task_id) for task_id in costs}
    tokens_ahead = 0
    for position, claimed in enumerate(claim(store)):
        snapshot = snapshots[claimed.task_id]
        assert (snapshot.position, snapshot.tokens_ahead) == (position, tokens_ahead)
        tokens_ahead += costs[claimed.task_id]


def test_a_cancelled_task_in_the_middle_leaves_no_tokens(store: TaskStore, redis_client: RedisClient) -> None:
    first, middle, third, last = (submit(store, redis_client, cost=cost) for cost in (1, 10, 100, 1000))
    store.cancel(middle)
    assert (inspect(store, third).position, inspect(store, third).tokens_ahead) == (1, 1)
    assert inspect(store, last).tokens_ahead == 101
    claim_one(store)
    assert inspect(store, third).tokens_ahead == 0
    assert inspect(store, last).tokens_ahead == 100
    assert inspect(store, first).claimed


def test_an_aged_task_is_counted_before_those_it_precedes(
    store: TaskStore, redis_client: RedisClient
) -> None:
    urgent = submit(store, redis_client, priority=1, cost=7)
    old = submit(store, redis_client, priority=4, cost=9)
    assert inspect(store, old).position == 1
    accept_earlier(redis_client, old, 300)
    assert (inspect(store, old).position, inspect(store, urgent).position) == (0, 1)
    assert inspect(store, urgent).tokens_ahead == 9


def test_the_reason_for_waiting(store: TaskStore, redis_client: RedisClient) -> None:
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


def test_the_position_of_a_requeued_task_is_its_rank(store: TaskStore, redis_client: RedisClient) -> None:
    task_id = submit(store, redis_client)
    claimed = claim_one(store)
    publish(store, claimed, 0, 1, scheduled="1")
    publish(store, claimed, 1, 0, waiting_for="kv_blocks", position="5")
    store.hand_back(owned([claimed]))
    snapshot = inspect(store, task_id)
    assert (snapshot.position, snapshot.waiting_for, snapshot.claimed) == (0, "worker", False)
    # It has started, and a status never goes back.
    assert snapshot.status == "in_progress"
    assert snapshot.num_entries == 1


def rate(store: TaskStore) -> float | None:
    return store.queue_stats(SLUG).drain_rate


def test_the_drain_rate_is_measured_while_tasks_wait(store: TaskStore, redis_client: RedisClient) -> None:
    for _ in range(6):
        submit(store, redis_client, cost=100)
    first, second = claim(store, 2)
    assert rate(store) is None
    let_pass(redis_client, 10)
    settle(store, first, 0, 3)
    # Fewer tokens have ended than are owned.
    assert rate(store) is None
    let_pass(redis_client, 10)
    settle(store, second, 0, 3)
    # 200 tokens in 20 seconds; earlier measurements count less.
    assert rate(store) == pytest.approx(10, rel=0.2)


def test_idle_time_does_not_count(store: TaskStore, redis_client: RedisClient) -> None:
    for _ in range(3):
        submit(store, redis_client, cost=100)
    claimed = claim_one(store)
    let_pass(redis_client, 10)
    settle(store, claimed, 0, 3)
    known = rate(store)
    assert known == pytest.approx(10, rel=0.1)
    for one in claim(store):
        settle(store, one, 0, 3)
    assert claim(store) == []
    let_pass(redis_client, 36_000)
    last = [submit(store, redis_client, cost=100) for _ in range(5)][-1]
    claimed = claim_one(store)
    assert rate(store) == pytest.approx(20, rel=1.1)
    let_pass(redis_client, 10)
    settle(store, claimed, 0, 3)
    put_ready(store)
    eta = eta_seconds(inspect(store, last))
    assert eta is not None
    assert eta < 60


def test_a_worker_without_waiting_tasks_is_not_measured(store: TaskStore, redis_client: RedisClient) -> None:
    """A single small task does not show what a saturated worker can do."""
    submit(store, redis_client, cost=40)
    claimed = claim_one(store)
    let_pass(redis_client, 50)
    settle(store, claimed, 0, 3)
    submit(store, redis_client, cost=40)
    assert rate(store) is None


def test_time_without_workers_does_not_count(store: TaskStore, redis_client: RedisClient) -> None:
    for _ in range(4):
        submit(store, redis_client, cost=100)
    claimed = claim_one(store)
    let_pass(redis_client, 10)
    settle(store, claimed, 0, 3)
    claim_one(store, lease_seconds=-1)
    let_pass(redis_client, 1)
    reap(store)
    let_pass(redis_client, 3000)
    claim_one(store)
    assert rate(store) == pytest.approx(10, rel=0.3)


@pytest.mark.parametrize("how", ["cancel", "fail"])
def test_tokens_that_were_not_served_do_not_count(
    store: TaskStore, redis_client: RedisClient, how: str
) -> None:
    for _ in range(30):
        submit(store, redis_client, cost=100)
    claimed = claim_one(store)
    let_pass(redis_client, 10)
    settle(store, claimed, 0, 3)
    for one in claim(store, 20):
        if how == "cancel":
            store.cancel(one.task_id)
        else:
            settle(store, one, 0, 1, "error")
    known = rate(store)
    assert known is not None
    # Three prompt tokens and one output token each, if served at all.
    assert known <= 10 * 1.1 + (20 * 4 / 10 if how == "fail" else 0)


def test_the_stats_of_an_unknown_model_are_empty(store: TaskStore) -> None:
    stats = store.queue_stats(SLUG)
    assert stats.waiting == dict.fromkeys(range(5), 0)
    assert (stats.oldest_age, stats.waiting_cost, stats.claimed, stats.totals) == (0.0, 0, 0, {})
    assert (stats.drain_rate, stats.num_ready_workers) == (None, 0)


def test_stats_count_classes_over_tenants(store: TaskStore, redis_client: RedisClient) -> None:
    for priority, tenant in ((0, "a"), (2, "a"), (2, "b"), (4, "b"), (2, "a")):
        submit(store, redis_client, priority=priority, tenant=tenant, cost=10)
    claim(store, 2)
    put_ready(store)
    stats = store.queue_stats(SLUG)
    assert stats.waiting == {0: 0, 1: 0, 2: 2, 3: 0, 4: 1}
    assert (stats.waiting_cost, stats.claimed, stats.num_ready_workers) == (30, 2, 1)
    assert stats.oldest_age > 0
    assert stats.totals == {"submitted": 5}


def test_costs_are_deleted_with_their_queue(store: TaskStore, redis_client: RedisClient) -> None:
    given = submission(redis_client, cost=10)
    store.submit(given)
    claimed = claim_one(store)
    assert not redis_client.exists(keys.cost(given.queue))
    later = submit(store, redis_client, cost=5)
    store.hand_back(owned([claimed]))
    assert (inspect(store, given.task_id).tokens_ahead, inspect(store, later).tokens_ahead) == (0, 10)
    assert store.queue_stats(SLUG).waiting_cost == 15


@pytest.mark.parametrize("after", [-5, -1, 0, 3, 4, 2**53, 2**70])
def test_a_log_can_be_read_from_any_entry(store: TaskStore, redis_client: RedisClient, after: int) -> None:
    task_id = submit(store, redis_client)
    publish(store, claim_one(store), 0, 5)
    expected = [seq for seq in range(5) if seq > after]
    assert [event.seq for event in store.read_log(task_id, after)] == expected
