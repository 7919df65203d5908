"""Claims, positions and token sums equal those of a naive model after any history. Submissions, claims,
cancellations, expiries, failures and hand-backs come in any order while time passes. Ages stay minutes away
from the limits of the rule, so that a slow machine changes nothing.
"""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.naive_order import by_age, counts_as, next_task, now_us, waiting_tasks
from tests.tokenmill.protocol.store.passing_time import let_pass
from tests.tokenmill.protocol.store.tasks import SLUG, settle, submit
from tokenmill.protocol.claim_order import ClaimOrder
from tokenmill.protocol.records import Claimed
from tokenmill.protocol.store.task_store import TaskStore

STEP_SECONDS = 330
ORDERS = (
    ClaimOrder(ageing_seconds=1000, max_waiting_seconds=3500),
    ClaimOrder(ageing_seconds=1000, max_waiting_seconds=3500, fair_sharing=False),
    ClaimOrder(ageing_seconds=700, max_waiting_seconds=1500),
    ClaimOrder(ageing_seconds=1000, max_waiting_seconds=None),
    ClaimOrder(ageing_seconds=None, max_waiting_seconds=3500),
)


class Queue(RuleBasedStateMachine):
    """Tasks of one model, of these `tenants`."""

    client: RedisClient
    tenants: str

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.store = TaskStore(self.client)
        self.order = ORDERS[0]
        self.waiting: set[str] = set()
        self.claimed: list[Claimed] = []
        self.claim(1)

    @rule(order=st.sampled_from(ORDERS))
    def change_settings(self, order: ClaimOrder) -> None:
        self.order = order
        self.claim(1)

    @rule(
        tenant=st.integers(0, 2),
        priority=st.integers(0, 4),
        cost=st.sampled_from([0, 1, 30, 5000]),
        count=st.integers(1, 3),
    )
    def submit(self, tenant: int, priority: int, cost: int, count: int) -> None:
        whose = self.tenants[tenant % len(self.tenants)]
        for _ in range(count):
            self.waiting.add(submit(self.store, self.client, tenant=whose, priority=priority, cost=cost))

    @rule(steps=st.integers(1, 4))
    def let_time_pass(self, steps: int) -> None:
        let_pass(self.client, steps * STEP_SECONDS)

    @rule(count=st.integers(1, 3))
    def claim(self, count: int) -> None:
        for _ in range(count):
            tasks = waiting_tasks(self.client, self.waiting)
            claimed = self.store.claim(SLUG, worker="w", max_tasks=1, lease_seconds=600, order=self.order)
            assert len(claimed) == min(1, len(tasks))
            for one in claimed:
                self.waiting.remove(one.task_id)
                self.claimed.append(one)

    @precondition(lambda self: self.waiting)
    @rule()
    def claim_the_expected_one(self) -> None:
        expected = next_task(self.client, waiting_tasks(self.client, self.waiting), self.order)
        self.claim(1)
        assert self.claimed[-1].task_id == expected.task_id

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        task_id = data.draw(st.sampled_from(sorted(self.waiting)))
        self.store.cancel(task_id)
        self.waiting.remove(task_id)

    @rule()
    def expire(self) -> None:
        timed_out = self.store.reap(SLUG, max_task_seconds=4200).timed_out
        self.waiting -= set(timed_out)

    @precondition(lambda self: self.claimed)
    @rule(data=st.data(), how=st.sampled_from(["hand back", "settle", "fail", "cancel"]))
    def give_up(self, data: st.DataObject, how: str) -> None:
        one = self.claimed.pop(data.draw(st.integers(0, len(self.claimed) - 1)))
        if how == "hand back":
            self.store.hand_back({one.task_id: one.owner})
            self.waiting.add(one.task_id)
        elif how == "cancel":
            self.store.cancel(one.task_id)
        else:
            settle(self.store, one, 0, 1, "stop" if how == "settle" else "error")

    @invariant()
    def positions_and_tokens_are_those_of_the_model(self) -> None:
        tasks = waiting_tasks(self.client, self.waiting)
        total = sum(task.cost for task in tasks)
        assert self.store.queue_stats(SLUG).waiting_cost == total
        now = now_us(self.client)
        for task in tasks:
            snapshot = self.store.inspect(task.task_id)
            assert snapshot is not None
            own = [other for other in tasks if other.tenant == task.tenant]
            before = by_age(own, self.order, now)
            before = before[: before.index(task)]
            exact = (len(before), sum(other.cost for other in before))
            if len(own) == len(tasks):
                assert (snapshot.position, snapshot.tokens_ahead) == exact
            elif snapshot.position:
                # An estimate: at least what this tenant itself has ahead of the task, at most everything.
                assert snapshot.tokens_ahead is not None
                assert exact[0] <= snapshot.position < len(tasks)
                assert exact[1] <= snapshot.tokens_ahead <= total - task.cost
            assert counts_as(task, self.order, now) <= task.priority

    @precondition(lambda self: self.waiting)
    @invariant()
    def the_next_alone_has_position_0(self) -> None:
        tasks = waiting_tasks(self.client, self.waiting)
        expected = next_task(self.client, tasks, self.order).task_id
        first = []
        for task in tasks:
            snapshot = self.store.inspect(task.task_id)
            assert snapshot is not None
            if snapshot.position == 0:
                first.append(task.task_id)
        assert first == [expected]


@pytest.mark.parametrize("tenants", ["a", "abc"])
def test_sums_are_exact_after_any_order_of_steps(redis_client: RedisClient, tenants: str) -> None:
    machine = type("AnyQueue", (Queue,), {"client": redis_client, "tenants": tenants})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=60,
            stateful_step_count=25,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.explicit, Phase.reuse, Phase.generate),
        ),
    )


def test_a_cancellation_in_the_middle_is_exact_at_once(redis_client: RedisClient, store: TaskStore) -> None:
    first = submit(store, redis_client, cost=10)
    large = submit(store, redis_client, cost=5000)
    second, last = submit(store, redis_client, cost=20), submit(store, redis_client, cost=7)
    store.cancel(large)
    snapshots = {task_id: store.inspect(task_id) for task_id in (first, second, last)}
    assert [snapshot.tokens_ahead for snapshot in snapshots.values() if snapshot] == [0, 10, 30]
