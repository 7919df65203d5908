"""In any order of steps, with crashes in between, each task ends once, its log has no gap and no duplicate,
each tenant is charged for what it was served, and no key remains. A model in plain Python has the
expected state, including the crashes that count. Leases lapse by being claimed with a negative duration, so
that no test waits. A crash is a worker that makes no further call; a lost reply is a call made twice.
"""

from typing import get_args

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.fair_model import Waiting
from tests.tokenmill.protocol.store.invariants import AFTER_THE_END, INVARIANTS
from tests.tokenmill.protocol.store.task_model import Expected, Holder, World
from tests.tokenmill.protocol.store.tasks import SLUG, fetch, final_write, owned, submission, tokens
from tokenmill.protocol import keys
from tokenmill.protocol.records import (
    Accepted,
    Cancelled,
    Gap,
    IdempotencyConflict,
    QueueFull,
    Reaped,
    Submitted,
    TaskPhase,
)

PHASES = st.sampled_from(("alone", "alone", *get_args(TaskPhase)))


class Service(RuleBasedStateMachine):
    """The steps of clients, workers and reapers, in any order."""

    client: RedisClient

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.world = World(self.client)

    submitted = Bundle("submitted")
    claims = Bundle("claims")

    @rule(
        target=submitted,
        priority=st.integers(1, 3),
        tenant=st.sampled_from("abc"),
        cost=st.integers(0, 50),
        limits=st.sampled_from([(None, None), (4, None), (None, 90)]),
        key=st.sampled_from([None, None, "k", "l"]),
        digest=st.sampled_from("12"),
    )
    def submit(
        self,
        priority: int,
        tenant: str,
        cost: int,
        limits: tuple[int | None, int | None],
        key: str | None,
        digest: str,
    ) -> MultipleResults[str] | str:
        given = submission(
            self.world.client,
            priority=priority,
            tenant=tenant,
            cost=cost,
            max_waiting=limits[0],
            max_waiting_tokens=limits[1],
            idempotency_key=key,
            body_digest=digest,
        )
        record = self.world.records.get((tenant, key)) if key else None
        if record and record[0] != digest:
            with pytest.raises(IdempotencyConflict):
                self.world.store.submit(given)
            return multiple()
        if record:
            assert self.world.store.submit(given) == Submitted(record[1], replayed=True)
            return multiple()
        if met := self.world.limit_met(cost, *limits):
            with pytest.raises(QueueFull) as full:
                self.world.store.submit(given)
            waiting = self.world.fair.waiting.values()
            assert (full.value.limit_met, full.value.depth) == (met, len(waiting))
            assert full.value.tokens == sum(task.cost for task in waiting)
            return multiple()
        for replayed in (False, True):
            assert self.world.store.submit(given) == Submitted(given.task_id, replayed=replayed)
        task = Waiting(priority, tenant, cost, accepted=len(self.world.tasks))
        self.world.tasks[given.task_id] = Expected(task)
        self.world.fair.enter(given.task_id, task)
        if key:
            self.world.records[tenant, key] = (digest, given.task_id)
        return given.task_id

    @rule(target=claims, count=st.integers(1, 4), lapsed=st.booleans())
    def claim(self, count: int, lapsed: bool) -> list[Holder]:
        seconds = -1 if lapsed else 600
        claimed = self.world.store.claim(SLUG, worker="w", max_tasks=count, lease_seconds=seconds)
        assert [one.task_id for one in claimed] == self.world.fair.claim(count)
        held = []
        for one in claimed:
            task = self.world.tasks[one.task_id]
            assert self.world.store.log_entries(one.task_id, one.num_entries) == tokens(0, task.num_tokens)
            assert one.suspect == task.is_suspect
            task.owner, task.lapsed, task.claimed_at = one.owner, lapsed, task.num_tokens
            task.phase = "untouched"
            held.append(Holder(one, sent=task.num_tokens))
        self.world.holders += held
        return held

    @rule(held=claims, count=st.integers(0, 3), again=st.booleans(), back=st.integers(0, 2))
    def publish(self, held: list[Holder], count: int, again: bool, back: int) -> None:
        """All tasks of a worker in one call, sometimes with an overlap, sometimes twice."""
        writes = []
        for holder in held:
            first = max(0, holder.sent - back)
            entries = tokens(first, holder.sent - first + count)
            writes.append(self.world.write(holder, first, entries))
        outcomes = self.world.store.publish(writes)
        if again:
            assert self.world.store.publish(writes) == outcomes
        for holder, write, outcome in zip(held, writes, outcomes, strict=True):
            if outcome == Accepted():
                holder.sent = write.first_seq + len(write.entries)
                if self.world.owns(holder):
                    self.world.tasks[holder.claimed.task_id].grow(holder.sent)
            self.world.check(holder, outcome)
            self.world.learn(holder, outcome)

    @rule(held=claims)
    def skip_ahead(self, held: list[Holder]) -> None:
        """The log lost its end, as the owner notices."""
        writes = [self.world.write(holder, holder.sent + 1, tokens(holder.sent + 1, 1)) for holder in held]
        for holder, outcome in zip(held, self.world.store.publish(writes), strict=True):
            if self.world.owns(holder):
                assert outcome == Gap(self.world.tasks[holder.claimed.task_id].num_tokens)
            else:
                assert outcome == self.world.refusal(holder)
                self.world.learn(holder, outcome)

    @rule(held=claims, reason=st.sampled_from(["stop", "length", "error", "timeout"]), again=st.booleans())
    def settle(self, held: list[Holder], reason: str, again: bool) -> None:
        for holder in held:
            task = self.world.tasks[holder.claimed.task_id]
            write = final_write(holder.claimed, holder.sent, 1, reason)
            (outcome,) = self.world.store.publish([write])
            if self.world.owns(holder):
                task.reason, task.ended_by, task.owner = reason, holder.claimed.owner, None
                task.num_tokens = holder.sent + 1
                self.world.let_go(task, num_served=3 + task.num_tokens)
                holder.sent += 2
                assert outcome == Accepted()
                if again:
                    assert self.world.store.publish([write]) == [Accepted()]
            else:
                assert outcome == self.world.refusal(holder)
                self.world.learn(holder, outcome)

    @rule(held=claims, lapsed=st.booleans(), phase=st.sampled_from(get_args(TaskPhase)))
    def renew(self, held: list[Holder], lapsed: bool, phase: TaskPhase) -> None:
        owners = owned([holder.claimed for holder in held])
        renewed = self.world.store.renew(owners, -1 if lapsed else 600, dict.fromkeys(owners, phase))
        for holder in held:
            task_id = holder.claimed.task_id
            is_cancelled = not self.world.owns(holder) and self.world.refusal(holder) == Cancelled()
            assert (task_id in renewed.cancelled) is is_cancelled
            assert (task_id in renewed.lost) is not (is_cancelled or self.world.owns(holder))
            if self.world.owns(holder):
                self.world.tasks[task_id].lapsed, self.world.tasks[task_id].phase = lapsed, phase
            else:
                self.world.tasks[task_id].absolve(holder.claimed.owner)

    @rule(held=claims, crashed=st.booleans())
    def hand_back(self, held: list[Holder], crashed: bool) -> None:
        mine = [holder.claimed.task_id for holder in held if self.world.owns(holder)]
        num_returned = self.world.store.hand_back(owned([holder.claimed for holder in held]), crashed=crashed)
        returned = [task_id for task_id in mine if not (crashed and self.world.dies(task_id))]
        assert num_returned == len(returned)
        for task_id in sorted(returned, key=lambda name: -self.world.tasks[name].waiting.accepted):
            self.world.put_back(task_id)

    @rule()
    def reap(self) -> None:
        assert self.reap_all().cancelled == ()

    @rule(times=st.integers(1, 4), first=PHASES, others=PHASES, calls_again=st.booleans())
    def claim_and_crash(self, times: int, first: TaskPhase, others: TaskPhase, calls_again: bool) -> None:
        """Several crashes of the owners of a task in one step: random steps rarely produce them."""
        while len(self.world.waiting()) < 2:
            self.submit(priority=1, tenant="a", cost=1, limits=(None, None), key=None, digest="1")
        for _ in range(times):
            held: list[Holder] = self.claim(2, lapsed=True)  # type: ignore[assignment]
            self.renew(held[:1], lapsed=True, phase=first)
            self.renew(held[1:], lapsed=True, phase=others)
            self.reap_all()
            if calls_again:
                # The owners were only stopped, and call again before other claims.
                self.renew(held, lapsed=False, phase="seated")

    def reap_all(self) -> Reaped:
        leased = [task_id.decode() for task_id in self.world.client.zrange(keys.LEASES, 0, -1)]
        lapsed = [task_id for task_id in leased if self.world.tasks[task_id].lapsed]
        reaped = self.world.store.reap(SLUG, max_task_seconds=3600)
        poisoned = set()
        for task_id in lapsed:
            if self.world.dies(task_id):
                poisoned.add(task_id)
            else:
                self.world.put_back(task_id)
        assert (set(reaped.returned), set(reaped.poisoned)) == (set(lapsed) - poisoned, poisoned)
        assert reaped.timed_out == ()
        return reaped

    @rule(task_id=submitted)
    def cancel(self, task_id: str) -> None:
        task = self.world.tasks[task_id]
        status = self.world.store.cancel(task_id)
        if task.reason is None:
            if task.owner:
                self.world.let_go(task, num_served=task.num_tokens)
            else:
                self.world.fair.leave(task_id)
            task.reason, task.cancelled_under, task.owner = "cancelled", task.owner, None
            assert status == "cancelled"
        else:
            assert status == {"stop": "completed", "length": "completed", "cancelled": "cancelled"}.get(
                task.reason, "failed"
            )

    @precondition(lambda self: self.world.waiting())
    @rule(data=st.data(), how=st.sampled_from(["cancel", "delete"]))
    def use_rqs_tools(self, data: st.DataObject, how: str) -> None:
        """Of a waiting task; the next script that finds it ends it. Here the reaper does."""
        task_id = data.draw(st.sampled_from(sorted(self.world.waiting())))
        getattr(fetch(self.world.client, task_id), how)()
        assert self.reap_all().cancelled == (task_id,)
        self.world.tasks[task_id].reason = "cancelled"
        self.world.fair.leave(task_id)

    @invariant()
    def all_invariants_hold(self) -> None:
        for check in INVARIANTS:
            check(self.world)

    def teardown(self) -> None:
        """All workers have died. A new one finishes all tasks, and no key remains."""
        for holder in self.world.holders:
            if self.world.owns(holder):
                self.world.store.renew(owned([holder.claimed]), -1)
                self.world.tasks[holder.claimed.task_id].lapsed = True
        self.reap_all()
        for claimed in self.world.store.claim(SLUG, worker="last", max_tasks=1000, lease_seconds=600):
            task = self.world.tasks[claimed.task_id]
            assert [claimed.task_id] == self.world.fair.claim(1)
            log = self.world.store.log_entries(claimed.task_id, claimed.num_entries)
            assert log == tokens(0, task.num_tokens)
            assert self.world.store.publish([final_write(claimed, task.num_tokens, 0)]) == [Accepted()]
            task.reason = "stop"
        assert all(task.reason for task in self.world.tasks.values())
        for check in AFTER_THE_END:
            check(self.world)


@pytest.mark.parametrize("steps", [30])
def test_any_order_of_steps(redis_client: RedisClient, steps: int) -> None:
    service = type("Service", (Service,), {"client": redis_client})
    run_state_machine_as_test(
        service,
        settings=settings(
            max_examples=40,
            stateful_step_count=steps,
            suppress_health_check=list(HealthCheck),
        ),
    )
