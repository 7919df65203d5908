"""Whatever order the steps come in, and whoever dies between them: each task ends once, its log has no gap
and no double, and nothing is left behind.

A model in plain Python says what must have happened, and whom deaths count against. Leases lapse by being
claimed with a negative length, so that no test waits. A crash is a worker that never calls again; a lost
reply is a call made twice.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import get_args

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from rq import Queue

from tests.worker.protocol.tasks import (
    SLUG,
    fetch,
    final_write,
    owned,
    submission,
    tokens,
)
from worker.protocol import keys
from worker.protocol.messages import FinishedEvent
from worker.protocol.naming import queue_name
from worker.protocol.store import (
    Accepted,
    Cancelled,
    Claimed,
    Gap,
    Lost,
    Reaped,
    Standing,
    TaskStore,
    Write,
)

STANDINGS = st.sampled_from(("alone", "alone", *get_args(Standing)))


@dataclass
class Expected:
    """What the model knows of a task."""

    queue: str
    cost: int
    num_tokens: int = 0
    owner: str | None = None
    lapsed: bool = False
    reason: str | None = None
    ended_by: str | None = None
    cancelled_under: str | None = None
    claimed_at: int = 0
    standing: Standing = "seated"
    crashes: list[tuple[str, Standing]] = field(default_factory=list)

    @property
    def is_suspect(self) -> bool:
        deaths = Counter(standing for _, standing in self.crashes)
        return bool(deaths["seated"] or deaths["alone"] or deaths["waiting"] >= 3)

    def grow(self, num_tokens: int) -> None:
        if num_tokens > self.num_tokens:
            self.num_tokens, self.crashes = num_tokens, []

    def die(self) -> bool:
        """Its worker has. Gives whether it is to blame, and ends."""
        assert self.owner is not None
        if self.standing != "untouched" and self.num_tokens == self.claimed_at:
            self.crashes.append((self.owner, self.standing))
        self.owner = None
        if is_poison := sum(standing == "alone" for _, standing in self.crashes) >= 3:
            self.reason = "error"
        return is_poison

    def absolve(self, owner: str) -> None:
        if self.reason is None:
            self.crashes = [crash for crash in self.crashes if crash[0] != owner]


@dataclass
class Holder:
    """A worker's own view of a task: it may be wrong, and must learn so."""

    claimed: Claimed
    sent: int = 0
    lost: bool = field(default=False)


class Service(RuleBasedStateMachine):
    """The steps of clients, workers and reapers, in any order."""

    client: redis.Redis

    def __init__(self) -> None:
        super().__init__()
        self.client.flushall()
        self.store = TaskStore(self.client)
        self.tasks: dict[str, Expected] = {}
        self.holders: list[Holder] = []

    submitted = Bundle("submitted")
    claims = Bundle("claims")

    @rule(target=submitted, priority=st.integers(1, 3), tenant=st.sampled_from("ab"), cost=st.integers(0, 50))
    def submit(self, priority: int, tenant: str, cost: int) -> str:
        given = submission(self.client, priority=priority, tenant=tenant, cost=cost)
        for replayed in (False, True):
            assert self.store.submit(given).replayed is replayed
        self.tasks[given.task_id] = Expected(queue_name(SLUG, priority, tenant), cost)
        return given.task_id

    @rule(target=claims, count=st.integers(1, 4), lapsed=st.booleans())
    def claim(self, count: int, lapsed: bool) -> list[Holder]:
        waiting = self.waiting()
        seconds = -1 if lapsed else 600
        claimed = self.store.claim(SLUG, worker="w", max_tasks=count, lease_seconds=seconds)
        assert len(claimed) == min(count, len(waiting))
        held = []
        for one in claimed:
            task = self.tasks[one.task_id]
            assert one.entries == tokens(0, task.num_tokens)
            assert one.suspect == task.is_suspect
            task.owner, task.lapsed, task.claimed_at = one.owner, lapsed, task.num_tokens
            task.standing = "untouched" if one.suspect else "seated"
            held.append(Holder(one, sent=task.num_tokens))
        self.holders += held
        return held

    @rule(held=claims, count=st.integers(0, 3), again=st.booleans(), back=st.integers(0, 2))
    def publish(self, held: list[Holder], count: int, again: bool, back: int) -> None:
        """All of a worker's tasks in one call; perhaps with an overlap, perhaps twice."""
        writes = []
        for holder in held:
            first = max(0, holder.sent - back)
            entries = tokens(first, holder.sent - first + count)
            writes.append(self.write(holder, first, entries))
        outcomes = self.store.publish(writes)
        if again:
            assert self.store.publish(writes) == outcomes
        for holder, write, outcome in zip(held, writes, outcomes, strict=True):
            if outcome == Accepted():
                holder.sent = write.first_seq + len(write.entries)
                if self.owns(holder):
                    self.tasks[holder.claimed.task_id].grow(holder.sent)
            self.check(holder, outcome)
            self.hear(holder, outcome)

    @rule(held=claims)
    def skip_ahead(self, held: list[Holder]) -> None:
        """The log lost its end, as the owner sees it."""
        writes = [self.write(holder, holder.sent + 1, tokens(holder.sent + 1, 1)) for holder in held]
        for holder, outcome in zip(held, self.store.publish(writes), strict=True):
            if self.owns(holder):
                assert outcome == Gap(self.tasks[holder.claimed.task_id].num_tokens)
            else:
                assert outcome == self.refusal(holder)
                self.hear(holder, outcome)

    @rule(held=claims, reason=st.sampled_from(["stop", "length", "error", "timeout"]), again=st.booleans())
    def settle(self, held: list[Holder], reason: str, again: bool) -> None:
        for holder in held:
            task = self.tasks[holder.claimed.task_id]
            write = final_write(holder.claimed, holder.sent, 1, reason)
            (outcome,) = self.store.publish([write])
            if self.owns(holder):
                task.reason, task.ended_by, task.owner = reason, holder.claimed.owner, None
                task.num_tokens = holder.sent + 1
                holder.sent += 2
                assert outcome == Accepted()
                if again:
                    assert self.store.publish([write]) == [Accepted()]
            else:
                assert outcome == self.refusal(holder)
                self.hear(holder, outcome)

    @rule(held=claims, lapsed=st.booleans(), standing=st.sampled_from(get_args(Standing)))
    def renew(self, held: list[Holder], lapsed: bool, standing: Standing) -> None:
        owners = owned([holder.claimed for holder in held])
        renewed = self.store.renew(owners, -1 if lapsed else 600, dict.fromkeys(owners, standing))
        for holder in held:
            task_id = holder.claimed.task_id
            is_cancelled = not self.owns(holder) and self.refusal(holder) == Cancelled()
            assert (task_id in renewed.cancelled) is is_cancelled
            assert (task_id in renewed.lost) is not (is_cancelled or self.owns(holder))
            if self.owns(holder):
                self.tasks[task_id].lapsed, self.tasks[task_id].standing = lapsed, standing
            else:
                self.tasks[task_id].absolve(holder.claimed.owner)

    @rule(held=claims, crashed=st.booleans())
    def hand_back(self, held: list[Holder], crashed: bool) -> None:
        mine = [self.tasks[holder.claimed.task_id] for holder in held if self.owns(holder)]
        num_returned = self.store.hand_back(owned([holder.claimed for holder in held]), crashed=crashed)
        num_poisoned = sum([task.die() for task in mine]) if crashed else 0
        assert num_returned == len(mine) - num_poisoned
        for task in mine:
            task.owner = None

    @rule()
    def reap(self) -> None:
        assert self.reap_all().cancelled == ()

    @rule(times=st.integers(1, 4), first=STANDINGS, others=STANDINGS, speaks=st.booleans())
    def claim_and_die(self, times: int, first: Standing, others: Standing, speaks: bool) -> None:
        """At once, as the deaths of several owners of one task would seldom come by chance."""
        while len(self.waiting()) < 2:
            self.submit(priority=1, tenant="a", cost=1)
        for _ in range(times):
            held = self.claim(2, lapsed=True)
            self.renew(held[:1], lapsed=True, standing=first)
            self.renew(held[1:], lapsed=True, standing=others)
            self.reap_all()
            if speaks:
                # They were only stopped, and come back before others have claimed.
                self.renew(held, lapsed=False, standing="seated")

    def reap_all(self) -> Reaped:
        lapsed = {task_id for task_id, task in self.tasks.items() if task.owner and task.lapsed}
        reaped = self.store.reap(SLUG, max_task_seconds=3600)
        poisoned = {task_id for task_id in lapsed if self.tasks[task_id].die()}
        assert (set(reaped.returned), set(reaped.poisoned)) == (lapsed - poisoned, poisoned)
        assert reaped.timed_out == ()
        return reaped

    @rule(task_id=submitted)
    def cancel(self, task_id: str) -> None:
        task = self.tasks[task_id]
        told = self.store.cancel(task_id)
        if task.reason is None:
            task.reason, task.cancelled_under, task.owner = "cancelled", task.owner, None
            assert told == "cancelled"
        else:
            assert told == {"stop": "completed", "length": "completed", "cancelled": "cancelled"}.get(
                task.reason, "failed"
            )

    @precondition(lambda self: self.waiting())
    @rule(data=st.data(), how=st.sampled_from(["cancel", "delete"]))
    def use_rqs_tools(self, data: st.DataObject, how: str) -> None:
        """On a waiting task; whoever comes by next ends it. Here the reaper does at once."""
        task_id = data.draw(st.sampled_from(sorted(self.waiting())))
        getattr(fetch(self.client, task_id), how)()
        assert self.reap_all().cancelled == (task_id,)
        self.tasks[task_id].reason = "cancelled"

    @invariant()
    def every_task_is_in_exactly_one_place(self) -> None:
        waiting = self.waiting()
        claimed = {task_id for task_id, task in self.tasks.items() if task.owner}
        listed: Counter[str] = Counter()
        for queue in {task.queue for task in self.tasks.values()}:
            order = [member.decode() for member in self.client.zrange(keys.order(queue), 0, -1)]
            assert Queue(queue, connection=self.client).job_ids == order
            listed.update(order)
        assert listed == Counter(waiting)
        assert {member.decode() for member in self.client.zrange(keys.LEASES, 0, -1)} == claimed
        composites = {
            member.decode()
            for queue in {task.queue for task in self.tasks.values()}
            for member in self.client.zrange(f"rq:wip:{queue}", 0, -1)
        }
        assert composites == {f"{task_id}:{self.tasks[task_id].owner}" for task_id in claimed}

    @invariant()
    def every_log_is_whole(self) -> None:
        for task_id, task in self.tasks.items():
            events = self.store.read_log(task_id)
            assert [event.seq for event in events] == list(range(task.num_tokens + (task.reason is not None)))
            ends = [event for event in events if isinstance(event, FinishedEvent)]
            assert [event.finish_reason for event in ends] == ([task.reason] if task.reason else [])
            assert all(event.done and event is events[-1] for event in ends)

    @invariant()
    def numbers_add_up(self) -> None:
        stats = self.store.queue_stats(SLUG)
        reasons = Counter(task.reason for task in self.tasks.values() if task.reason)
        assert stats.totals.get("submitted", 0) == len(self.tasks)
        for reason in ("stop", "length", "error", "timeout", "cancelled"):
            assert stats.totals.get(f"finished:{reason}", 0) == reasons[reason]
        assert stats.totals.get("completion_tokens", 0) == sum(
            task.num_tokens for task in self.tasks.values() if task.reason
        )
        assert stats.waiting_cost == sum(self.tasks[task_id].cost for task_id in self.waiting())
        assert sum(stats.waiting.values()) == len(self.waiting())
        assert stats.claimed == sum(task.owner is not None for task in self.tasks.values())

    @invariant()
    def standing_is_that_of_the_claims(self) -> None:
        """Positions are a permutation; costs before the first are none."""
        snapshots = [self.store.inspect(task_id) for task_id in self.waiting()]
        assert sorted(snapshot.position for snapshot in snapshots) == list(range(len(snapshots)))
        for snapshot in snapshots:
            assert (snapshot.position == 0) <= (snapshot.tokens_ahead == 0)
            total = sum(self.tasks[task_id].cost for task_id in self.waiting())
            assert 0 <= snapshot.tokens_ahead <= total - self.tasks[snapshot.task_id].cost

    def teardown(self) -> None:
        """Everybody has died. A new worker finishes all that is left, and nothing stays behind."""
        for holder in self.holders:
            if self.owns(holder):
                self.store.renew(owned([holder.claimed]), -1)
        self.store.reap(SLUG, max_task_seconds=3600)
        for task in self.tasks.values():
            task.owner = None
        for claimed in self.store.claim(SLUG, worker="last", max_tasks=1000, lease_seconds=600):
            task = self.tasks[claimed.task_id]
            assert claimed.entries == tokens(0, task.num_tokens)
            assert self.store.publish([final_write(claimed, task.num_tokens, 0)]) == [Accepted()]
            task.reason = "stop"
        assert all(task.reason for task in self.tasks.values())
        self.every_task_is_in_exactly_one_place()
        self.every_log_is_whole()
        self.numbers_add_up()
        kept = {key.decode().split(":")[1] for key in self.client.scan_iter("tokenmill:*")}
        assert kept <= {"run", "log", "totals", "drained", "clock", "shown"}
        kept_by_rq = {key.decode().split(":")[1] for key in self.client.scan_iter("rq:*")}
        assert kept_by_rq <= {"job", "results", "finished", "failed", "canceled", "queues"}
        for task_id in self.tasks:
            assert self.client.pttl(keys.run(task_id)) > 0

    def waiting(self) -> set[str]:
        return {name for name, task in self.tasks.items() if task.reason is None and task.owner is None}

    def owns(self, holder: Holder) -> bool:
        return self.tasks[holder.claimed.task_id].owner == holder.claimed.owner

    def write(self, holder: Holder, first: int, entries: tuple) -> Write:
        claimed = holder.claimed
        return Write(task_id=claimed.task_id, owner=claimed.owner, first_seq=first, entries=entries)

    def check(self, holder: Holder, outcome: object) -> None:
        """The owner is never refused; another is, unless it says what its own settlement has stored."""
        if self.owns(holder):
            assert outcome == Accepted()
        elif self.tasks[holder.claimed.task_id].ended_by != holder.claimed.owner:
            assert outcome == self.refusal(holder)

    def hear(self, holder: Holder, outcome: object) -> None:
        """One that is refused has spoken: it is not dead."""
        if outcome == Lost():
            self.tasks[holder.claimed.task_id].absolve(holder.claimed.owner)

    def refusal(self, holder: Holder) -> Lost | Cancelled:
        """What one who does not own the task is told."""
        owner = self.tasks[holder.claimed.task_id].cancelled_under
        return Cancelled() if owner == holder.claimed.owner else Lost()


@pytest.mark.parametrize("steps", [30])
def test_any_order_of_steps(redis_client: redis.Redis, steps: int) -> None:
    service = type("Service", (Service,), {"client": redis_client})
    run_state_machine_as_test(
        service,
        settings=settings(
            max_examples=40,
            stateful_step_count=steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
