"""The order of claims among tenants: promoted tasks, effective classes, tokens served, acceptance.
Invariants: a new tenant is claimed from within a few claims, whatever others have waiting; a promoted task is
claimed in its turn; equal tenants get equal tokens; unused cost is returned. The state is in Redis, so all of
this holds across workers.
"""

import dataclasses
from collections import Counter

import pytest

from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.passing_time import let_pass
from tests.tokenmill.protocol.store.tasks import (
    SLUG,
    claim,
    claim_one,
    owned,
    publish,
    settle,
    snapshot_of,
    submission,
    submit,
)
from tokenmill.protocol import keys
from tokenmill.protocol.claim_order import ClaimOrder
from tokenmill.protocol.naming import new_task_id, tenant_hash, tenant_of
from tokenmill.protocol.records import Claimed
from tokenmill.protocol.store.task_store import TaskStore

FLOOD = 1000


def flood(store: TaskStore, client: RedisClient, count: int, **fields: object) -> None:
    """Many equal tasks."""
    given = submission(client, **fields)
    for _ in range(count):
        store.submit(dataclasses.replace(given, task_id=new_task_id()))


def counter(client: RedisClient, tenant: str) -> float | None:
    score: float | None = client.zscore(keys.shares(SLUG), tenant_hash(tenant))
    if score is None:
        score = client.zscore(keys.away(SLUG), tenant_hash(tenant))
    return score


def claim_by_turns(client: RedisClient, count: int, max_tasks: int = 1) -> list[Claimed]:
    """Claim this many tasks, by several workers in turn."""
    claimed: list[Claimed] = []
    while len(claimed) < count:
        worker = f"worker {len(claimed) % 3}"
        store = TaskStore(client)
        claimed += store.claim(SLUG, worker=worker, max_tasks=max_tasks, lease_seconds=60)
    return claimed


def test_a_flood_of_one_tenant_does_not_block_another(store: TaskStore, redis_client: RedisClient) -> None:
    flood(store, redis_client, FLOOD, tenant="flood", cost=50)
    claim_by_turns(redis_client, 20)
    lone = submit(store, redis_client, tenant="lone", cost=50)
    assert lone in [one.task_id for one in claim_by_turns(redis_client, 2)]


def test_each_of_many_tenants_is_served_before_a_flood_continues(
    store: TaskStore, redis_client: RedisClient
) -> None:
    flood(store, redis_client, 100, tenant="flood", cost=50)
    claim(store, 30)
    ids = [submit(store, redis_client, tenant=f"tenant {n}", cost=50) for n in range(20)]
    assert [one.task_id for one in claim(store, 21)][1:] == ids


def test_idle_time_earns_no_credit(store: TaskStore, redis_client: RedisClient) -> None:
    """The counter of a tenant that returns is lifted to the minimum."""
    submit(store, redis_client, tenant="late", cost=10)
    claim_one(store)
    flood(store, redis_client, 100, tenant="busy", cost=50)
    claim(store, 60)
    flood(store, redis_client, 20, tenant="late", cost=50)
    turns = Counter(tenant_of(one.queue) for one in claim(store, 20))
    assert turns == {tenant_hash("busy"): 10, tenant_hash("late"): 10}


@pytest.mark.parametrize("max_tasks", [1, 7])
def test_equal_loads_get_equal_tokens(store: TaskStore, redis_client: RedisClient, max_tasks: int) -> None:
    """Tokens, not tasks: always within the cost of one task, also with large and small tasks."""
    costs = {"a": 70, "b": 10, "c": 35}
    for tenant, cost in costs.items():
        flood(store, redis_client, 2100 // cost, tenant=tenant, cost=cost)
    served: Counter[str] = Counter()
    by_hash = {tenant_hash(tenant): cost for tenant, cost in costs.items()}
    for one in claim_by_turns(redis_client, 180, max_tasks):
        tenant = tenant_of(one.queue)
        served[tenant] += by_hash[tenant]
        assert max(served.values()) - min(served[name] for name in by_hash) <= 70
    assert min(served.values()) > 1000


def test_a_tenant_has_one_share_over_all_classes(store: TaskStore, redis_client: RedisClient) -> None:
    for tenant, priority in (("a", 1), ("a", 2), ("b", 2)):
        flood(store, redis_client, 3, tenant=tenant, priority=priority)
    turns = [tenant_of(one.queue) for one in claim(store, 9)]
    # The better class first; in the other class "b" has been served less by then, and catches up.
    assert turns == [tenant_hash(tenant) for tenant in "aaabbbaaa"]


@pytest.mark.parametrize("others", [[], ["other"]])
def test_a_promoted_task_passes_a_flood_of_the_best_class(
    store: TaskStore, redis_client: RedisClient, others: list[str]
) -> None:
    """With one tenant and with several; sglang#31954: without ageing a steady stream starves the rest."""
    last = submit(store, redis_client, tenant="a", priority=4)
    for _ in range(3):
        for tenant in ["a", *others]:
            flood(store, redis_client, 10, tenant=tenant, priority=0)
        # More tasks arrive than are served.
        assert last not in [one.task_id for one in claim(store, 5)]
        let_pass(redis_client, 39)
    let_pass(redis_client, 4)
    flood(store, redis_client, 10, tenant="b", priority=0)
    assert last in [one.task_id for one in claim(store, 2)]


def test_every_task_of_a_queue_ages_beside_other_tenants(store: TaskStore, redis_client: RedisClient) -> None:
    """A claim from a queue does not reset the age of the tasks behind it."""
    old = [submit(store, redis_client, tenant="a", priority=4) for _ in range(3)]
    let_pass(redis_client, 200)
    flood(store, redis_client, 3, tenant="b", priority=0, cost=1000)
    claim_one(store)
    # "b" was not served less.
    flood(store, redis_client, 3, tenant="b", priority=0, cost=1000)
    claimed = [one.task_id for one in claim(store, 4)]
    assert set(old[1:]) <= set(claimed)


def test_promoted_tasks_go_oldest_first(store: TaskStore, redis_client: RedisClient) -> None:
    ids = []
    for tenant, priority in (("a", 3), ("b", 4), ("c", 0), ("a", 1)):
        ids.append(submit(store, redis_client, tenant=tenant, priority=priority))
        let_pass(redis_client, 10)
    let_pass(redis_client, 200)
    assert [one.task_id for one in claim(store, 4)] == ids


def test_promoted_tenants_take_turns(store: TaskStore, redis_client: RedisClient) -> None:
    """A backlog that is promoted as a whole does not block the promoted task of another tenant."""
    flood(store, redis_client, 50, tenant="flood")
    let_pass(redis_client, 300)
    claim(store, 5)
    lone = submit(store, redis_client, tenant="lone", priority=4)
    assert lone not in [one.task_id for one in claim(store, 5)]
    let_pass(redis_client, 121)
    assert claim_one(store).task_id == lone


def test_an_old_backlog_does_not_block_a_new_task_of_another_tenant(
    store: TaskStore, redis_client: RedisClient
) -> None:
    """Every second claim goes by class and tokens served alone, so the bound does not grow with the flood."""
    flood(store, redis_client, 200, tenant="flood", cost=50)
    let_pass(redis_client, 3600)
    claim(store, 20)
    for _ in range(10):
        lone = submit(store, redis_client, tenant="lone", cost=50)
        assert lone in [one.task_id for one in claim_by_turns(redis_client, 3)]


def test_a_promoted_queue_gains_no_turn_when_its_head_is_cancelled(
    store: TaskStore, redis_client: RedisClient
) -> None:
    flood(store, redis_client, 5, tenant="a", cost=0)
    flood(store, redis_client, 5, tenant="b", cost=0)
    let_pass(redis_client, 300)
    served = claim_one(store)
    store.cancel(redis_client.zrange(keys.order(served.queue), 0, 0)[0].decode())
    assert tenant_of(claim_one(store).queue) == tenant_hash("b")
    assert tenant_of(claim_one(store).queue) == tenant_hash("a")


@pytest.mark.parametrize("num_floods", [1, 3, 10])
def test_the_documented_bounds_hold_whatever_others_have_waiting(
    store: TaskStore, redis_client: RedisClient, num_floods: int
) -> None:
    """For a promoted task of the worst class, and for a new one of the same class as the floods."""
    for n in range(num_floods):
        flood(store, redis_client, 60, tenant=f"flood {n}", cost=1 + 100 * n)
    let_pass(redis_client, 3600)
    claim(store, 30)
    last = submit(store, redis_client, tenant="last", priority=4)
    let_pass(redis_client, 121)
    for n in range(num_floods):
        flood(store, redis_client, 60, tenant=f"flood {n}", priority=0, cost=10)
    bound = 2 * num_floods + 2
    assert last in [one.task_id for one in claim_by_turns(redis_client, bound)]
    new = submit(store, redis_client, tenant="new", priority=0)
    assert new in [one.task_id for one in claim_by_turns(redis_client, bound)]


def test_every_second_claim_goes_by_age(store: TaskStore, redis_client: RedisClient) -> None:
    flood(store, redis_client, 20, tenant="heavy", cost=1000, priority=4)
    submit(store, redis_client, tenant="other", cost=1)
    claim(store, 2)
    let_pass(redis_client, 200)
    flood(store, redis_client, 20, tenant="new", cost=1)
    turns = [tenant_of(one.queue) for one in claim(store, 8)]
    assert turns.count(tenant_hash("heavy")) >= 4


def test_the_settings_determine_the_order(store: TaskStore, redis_client: RedisClient) -> None:
    """Each claim sends them; positions follow from those of the last claim."""

    def first(order: ClaimOrder) -> str:
        (one,) = store.claim(SLUG, worker="w", max_tasks=1, lease_seconds=60, order=order)
        store.hand_back({one.task_id: one.owner})
        snapshot = store.inspect(one.task_id)
        assert snapshot is not None
        assert snapshot.position == 0
        return one.task_id

    old = submit(store, redis_client, priority=4)
    let_pass(redis_client, 50)
    new = submit(store, redis_client, priority=1)
    assert first(ClaimOrder()) == new
    assert first(ClaimOrder(max_waiting_seconds=40)) == old
    assert first(ClaimOrder(ageing_seconds=12)) == old
    assert first(ClaimOrder(ageing_seconds=None, max_waiting_seconds=None)) == new


def test_without_fair_sharing_tasks_of_a_class_go_by_arrival(
    store: TaskStore, redis_client: RedisClient
) -> None:
    flood(store, redis_client, 5, tenant="a", cost=1000)
    lone = submit(store, redis_client, tenant="b", cost=1)
    urgent = submit(store, redis_client, tenant="c", cost=1, priority=1)
    claimed = store.claim(
        SLUG, worker="w", max_tasks=10, lease_seconds=60, order=ClaimOrder(fair_sharing=False)
    )
    ids = [one.task_id for one in claimed]
    assert (ids[0], ids[-1]) == (urgent, lone)


def test_a_stream_of_new_tenants_does_not_starve_one_that_was_served_more(
    store: TaskStore, redis_client: RedisClient
) -> None:
    """Each new tenant starts with the minimum counter, so the others would never be the minimum."""
    flood(store, redis_client, 2, tenant="heavy", cost=1000)
    submit(store, redis_client, tenant="first", cost=1)
    assert tenant_of(claim_one(store).queue) == tenant_hash("heavy")
    for minute in range(6):
        for n in range(5):
            submit(store, redis_client, tenant=f"new {minute} {n}", cost=1)
        claimed = [tenant_of(one.queue) for one in claim(store, 3)]
        if tenant_hash("heavy") in claimed:
            break
        let_pass(redis_client, 61)
    # Tenants that came within a minute after it have aged as much, and go first once.
    assert minute == 2


def test_unused_cost_is_returned(store: TaskStore, redis_client: RedisClient) -> None:
    """An estimate that was too high costs the tenant nothing; one that was too low is charged at the end."""
    submit(store, redis_client, tenant="a", cost=500)
    first = claim_one(store)
    assert counter(redis_client, "a") == 500
    settle(store, first, 0, 4)
    assert counter(redis_client, "a") == 3 + 4
    submit(store, redis_client, tenant="a", cost=1)
    settle(store, claim_one(store), 0, 40)
    assert counter(redis_client, "a") == (3 + 4) + (3 + 40)


def test_a_requeued_task_is_charged_once(store: TaskStore, redis_client: RedisClient) -> None:
    submit(store, redis_client, tenant="a", cost=500)
    for _ in range(3):
        store.hand_back(owned([claim_one(store)]))
        assert counter(redis_client, "a") == 0
        claim_one(store, lease_seconds=-1)
        assert counter(redis_client, "a") == 500
        store.reap(SLUG, max_task_seconds=3600)
    settle(store, claim_one(store), 0, 4)
    assert counter(redis_client, "a") == 7


def test_a_cancelled_task_is_charged_for_its_tokens(store: TaskStore, redis_client: RedisClient) -> None:
    waiting, running = (submit(store, redis_client, tenant="a", cost=500) for _ in range(2))
    store.cancel(waiting)
    claim_one(store)
    store.cancel(running)
    assert counter(redis_client, "a") == 0


def test_cached_tokens_are_not_charged(store: TaskStore, redis_client: RedisClient) -> None:
    submit(store, redis_client, tenant="a", cost=500)
    claimed = claim_one(store)
    publish(store, claimed, 0, 1, cached_tokens="2")
    settle(store, claimed, 1, 3)
    assert counter(redis_client, "a") == (3 - 2) + 4


def test_counters_of_idle_tenants_expire(store: TaskStore, redis_client: RedisClient) -> None:
    """A counter that would be lifted to the minimum is dropped at once, others after an hour."""
    redis_client.zadd(keys.away(SLUG), {f"tenant {n}": 10 + n for n in range(10_100)})
    submit(store, redis_client, tenant="a", cost=10)
    claim_one(store)
    assert redis_client.zcard(keys.away(SLUG)) <= 10_001
    assert redis_client.zscore(keys.away(SLUG), "tenant 10099") == 10_109
    assert 0 < redis_client.pttl(keys.away(SLUG)) <= 3_600_000
    flood(store, redis_client, 20, tenant="busy", cost=1000)
    claim(store, 15)
    submit(store, redis_client, tenant="another")
    assert redis_client.zcard(keys.away(SLUG)) == 0


def test_the_cost_of_a_claim_does_not_depend_on_the_number_of_tenants(
    store: TaskStore, redis_client: RedisClient
) -> None:
    """Commands in the scripts of a claim, an inspection and a submission, with four tenants and a hundred."""

    def commands() -> list[int]:
        counts = []
        for call in (
            lambda: claim(store, 8),
            lambda: store.inspect(last),
            lambda: submit(store, redis_client, tenant="tenant 0", max_waiting=10**6),
        ):
            redis_client.config_resetstat()
            call()
            stats = redis_client.info("commandstats")
            counts.append(sum(one["calls"] for one in stats.values()))
        return counts

    def fill(tenants: range) -> str:
        for n in tenants:
            for priority in (1, 2, 3):
                flood(store, redis_client, 3, tenant=f"tenant {n}", priority=priority)
        return submit(store, redis_client, tenant="tenant 1", priority=2)

    last = fill(range(4))
    few = commands()
    last = fill(range(4, 100))
    assert all(many <= 1.2 * some for many, some in zip(commands(), few, strict=True))


def test_the_estimated_position_is_close_to_the_actual_one(
    store: TaskStore, redis_client: RedisClient
) -> None:
    """A flood does not count as a whole before tenants that it does not delay."""
    flood(store, redis_client, 100, tenant="flood", cost=40)
    for tenant in ("a", "b"):
        flood(store, redis_client, 10, tenant=tenant, cost=20)
    lone = submit(store, redis_client, tenant="lone", cost=10)
    waiting = [
        task_id.decode()
        for queue in redis_client.zrange(keys.queues(SLUG), 0, -1)
        for task_id in redis_client.zrange(keys.order(queue.decode()), 0, -1)
    ]
    snapshots = {task_id: snapshot_of(store, task_id) for task_id in waiting}
    assert (snapshots[lone].position or 0) <= 4
    tokens_ahead = 0
    for position, one in enumerate(claim(store, 40)):
        snapshot = snapshots[one.task_id]
        assert snapshot.position is not None
        assert snapshot.tokens_ahead is not None
        assert abs(snapshot.position - position) <= 5
        assert abs(snapshot.tokens_ahead - tokens_ahead) <= 50 + 0.4 * tokens_ahead
        tokens_ahead += store_cost(redis_client, one.task_id)
    assert (snapshots[waiting[99]].position or 0) > 60


def store_cost(client: RedisClient, task_id: str) -> int:
    return int(client.hget(keys.run(task_id), "cost"))
