"""Whatever order the steps come in, and whoever dies between them: each task ends once, its log has no gap
and no double, each tenant is charged for what it was served, and nothing is left behind.

A model in plain Python says what must have happened, and whom deaths count against. Leases lapse by being
claimed with a negative length, so that no test waits. A crash is a worker that never calls again; a lost
reply is a call made twice.
"""

import copy
from collections import Counter
from dataclasses import dataclass, field
from typing import get_args

import pytest
import redis
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
from rq import Queue

from tests.worker.protocol.fair_model import FairModel, Waiting
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
from worker.protocol.naming import queue_name, tenant_hash
from worker.protocol.store import (
    Accepted,
    Cancelled,
    Claimed,
    Gap,
    IdempotencyConflict,
    Lost,
    QueueFull,
    Reaped,
    Standing,
    Submitted,
    TaskStore,
    Write,
)

STANDINGS = st.sampled_from(("alone", "alone", *get_args(Standing)))


@dataclass
class Expected:
    """What the model knows of a task."""

    waiting: Waiting
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
        if is_poison := sum(standing == "alone" for _, standing in self.crashes) >= 3:
            self.reason = "error"
        return is_poison

    def absolve(self, owner: str) -> None:
        if self.reason is None:
            self.crashes = [crash for crash in self.crashes if crash[0] != owner]

    @property
    def queue(self) -> str:
        return queue_name(SLUG, self.waiting.priority, self.waiting.tenant)

    @property
    def cost(self) -> int:
        return self.waiting.cost


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
        self.fair = FairModel()
        self.records: dict[tuple[str, str], tuple[str, str]] = {}

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
            self.client,
            priority=priority,
            tenant=tenant,
            cost=cost,
            max_waiting=limits[0],
            max_waiting_tokens=limits[1],
            idempotency_key=key,
            body_digest=digest,
        )
        record = self.records.get((tenant, key)) if key else None
        if record and record[0] != digest:
            with pytest.raises(IdempotencyConflict):
                self.store.submit(given)
            return multiple()
        if record:
            assert self.store.submit(given) == Submitted(record[1], replayed=True)
            return multiple()
        if met := self.limit_met(cost, *limits):
            with pytest.raises(QueueFull) as full:
                self.store.submit(given)
            waiting = self.fair.waiting.values()
            assert (full.value.limit_met, full.value.depth) == (met, len(waiting))
            assert full.value.tokens == sum(task.cost for task in waiting)
            return multiple()
        for replayed in (False, True):
            assert self.store.submit(given) == Submitted(given.task_id, replayed=replayed)
        task = Waiting(priority, tenant, cost, accepted=len(self.tasks))
        self.tasks[given.task_id] = Expected(task)
        self.fair.enter(given.task_id, task)
        if key:
            self.records[tenant, key] = (digest, given.task_id)
        return given.task_id

    def limit_met(self, cost: int, max_tasks: int | None, max_tokens: int | None) -> str | None:
        num_tasks = len(self.fair.waiting)
        if max_tasks is not None and num_tasks >= max_tasks:
            return "tasks"
        tokens = sum(task.cost for task in self.fair.waiting.values())
        return "tokens" if max_tokens is not None and num_tasks and tokens + cost > max_tokens else None

    @rule(target=claims, count=st.integers(1, 4), lapsed=st.booleans())
    def claim(self, count: int, lapsed: bool) -> list[Holder]:
        seconds = -1 if lapsed else 600
        claimed = self.store.claim(SLUG, worker="w", max_tasks=count, lease_seconds=seconds)
        assert [one.task_id for one in claimed] == self.fair.claim(count)
        held = []
        for one in claimed:
            task = self.tasks[one.task_id]
            assert self.store.log_entries(one.task_id, one.num_entries) == tokens(0, task.num_tokens)
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
                self.let_go(task, num_served=3 + task.num_tokens)
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
        mine = [holder.claimed.task_id for holder in held if self.owns(holder)]
        num_returned = self.store.hand_back(owned([holder.claimed for holder in held]), crashed=crashed)
        returned = [task_id for task_id in mine if not (crashed and self.dies(task_id))]
        assert num_returned == len(returned)
        for task_id in sorted(returned, key=lambda name: -self.tasks[name].waiting.accepted):
            self.put_back(task_id)

    @rule()
    def reap(self) -> None:
        assert self.reap_all().cancelled == ()

    @rule(times=st.integers(1, 4), first=STANDINGS, others=STANDINGS, speaks=st.booleans())
    def claim_and_die(self, times: int, first: Standing, others: Standing, speaks: bool) -> None:
        """At once, as the deaths of several owners of one task would seldom come by chance."""
        while len(self.waiting()) < 2:
            self.submit(priority=1, tenant="a", cost=1, limits=(None, None), key=None, digest="1")
        for _ in range(times):
            held = self.claim(2, lapsed=True)
            self.renew(held[:1], lapsed=True, standing=first)
            self.renew(held[1:], lapsed=True, standing=others)
            self.reap_all()
            if speaks:
                # They were only stopped, and come back before others have claimed.
                self.renew(held, lapsed=False, standing="seated")

    def reap_all(self) -> Reaped:
        leased = [task_id.decode() for task_id in self.client.zrange(keys.LEASES, 0, -1)]
        lapsed = [task_id for task_id in leased if self.tasks[task_id].lapsed]
        reaped = self.store.reap(SLUG, max_task_seconds=3600)
        poisoned = set()
        for task_id in lapsed:
            if self.dies(task_id):
                poisoned.add(task_id)
            else:
                self.put_back(task_id)
        assert (set(reaped.returned), set(reaped.poisoned)) == (set(lapsed) - poisoned, poisoned)
        assert reaped.timed_out == ()
        return reaped

    @rule(task_id=submitted)
    def cancel(self, task_id: str) -> None:
        task = self.tasks[task_id]
        told = self.store.cancel(task_id)
        if task.reason is None:
            if task.owner:
                self.let_go(task, num_served=task.num_tokens)
            else:
                self.fair.leave(task_id)
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
        self.fair.leave(task_id)

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
    def what_waits_is_counted(self) -> None:
        """The counters that submissions ask are never off."""
        kept = self.client.hgetall(keys.waiting(SLUG))
        assert {name.decode(): int(number) for name, number in kept.items()} == self.fair.num_waiting()

    @invariant()
    def tenants_are_charged_for_what_they_were_served(self) -> None:
        """Also over crashes, hand-backs and ends: what a claim has charged is corrected once."""
        kept = dict(self.client.zrange(keys.shares(SLUG), 0, -1, withscores=True))
        waiting = {tenant_hash(tenant): self.fair.counters[tenant] for tenant in self.fair.tenants()}
        assert {name.decode(): counter for name, counter in kept.items()} == waiting
        away = dict(self.client.zrange(keys.away(SLUG), 0, -1, withscores=True))
        away.pop(b":last", None)
        remembered = {tenant_hash(tenant): counter for tenant, counter in self.fair.counters.items()}
        rest = {name: counter for name, counter in remembered.items() if name not in waiting}
        assert {name.decode(): counter for name, counter in away.items()} == rest
        assert min((*kept.values(), *away.values()), default=0) >= 0

    @invariant()
    def lines_are_those_that_wait(self) -> None:
        expected: dict[str, dict[str, float]] = {}
        heads = {}
        for (priority, tenant), (_, head) in self.fair.lines().items():
            accepted = int(self.client.hget(keys.run(head), "accepted_us"))
            queue = queue_name(SLUG, priority, tenant)
            heads[queue] = accepted
            expected.setdefault(f"{SLUG}:{priority}", {})[f"{accepted:020}{queue}"] = self.fair.counters[
                tenant
            ]
        queues = self.client.zrange(keys.queues(SLUG), 0, -1, withscores=True)
        assert {name.decode(): score for name, score in queues} == heads
        for group in (f"{SLUG}:{priority}" for priority in range(5)):
            lines = self.client.zrange(keys.lines(group), 0, -1, withscores=True)
            assert {name.decode(): score for name, score in lines} == expected.get(group, {})
            unserved = self.client.zrange(keys.unserved(group), 0, -1)
            assert sorted(name.decode() for name in unserved) == sorted(
                member[20:] for member in expected.get(group, {})
            )

    @invariant()
    def standing_is_that_of_the_claims(self) -> None:
        """The next to be claimed has position 0, no other has; with one tenant they are a permutation."""
        snapshots = [self.store.inspect(task_id) for task_id in self.waiting()]
        positions = sorted(snapshot.position for snapshot in snapshots)
        first = [snapshot.task_id for snapshot in snapshots if snapshot.position == 0]
        assert first == copy.deepcopy(self.fair).claim(1)
        if len(self.fair.tenants()) == 1:
            assert positions == list(range(len(snapshots)))
        for snapshot in snapshots:
            assert (snapshot.position == 0) <= (snapshot.tokens_ahead == 0)
            total = sum(self.tasks[task_id].cost for task_id in self.waiting())
            assert snapshot.position < len(snapshots)
            assert 0 <= snapshot.tokens_ahead <= total - self.tasks[snapshot.task_id].cost

    def teardown(self) -> None:
        """Everybody has died. A new worker finishes all that is left, and nothing stays behind."""
        for holder in self.holders:
            if self.owns(holder):
                self.store.renew(owned([holder.claimed]), -1)
                self.tasks[holder.claimed.task_id].lapsed = True
        self.reap_all()
        for claimed in self.store.claim(SLUG, worker="last", max_tasks=1000, lease_seconds=600):
            task = self.tasks[claimed.task_id]
            assert [claimed.task_id] == self.fair.claim(1)
            log = self.store.log_entries(claimed.task_id, claimed.num_entries)
            assert log == tokens(0, task.num_tokens)
            assert self.store.publish([final_write(claimed, task.num_tokens, 0)]) == [Accepted()]
            task.reason = "stop"
        assert all(task.reason for task in self.tasks.values())
        self.every_task_is_in_exactly_one_place()
        self.every_log_is_whole()
        self.numbers_add_up()
        assert self.client.pttl(keys.away(SLUG)) > 0 or not self.tasks
        kept = {key.decode().split(":")[1] for key in self.client.scan_iter("tokenmill:*")}
        assert kept <= {"run", "log", "totals", "drained", "clock", "shown", "away", "idem"}
        kept_by_rq = {key.decode().split(":")[1] for key in self.client.scan_iter("rq:*")}
        assert kept_by_rq <= {"job", "results", "finished", "failed", "canceled", "queues"}
        for task_id in self.tasks:
            assert self.client.pttl(keys.run(task_id)) > 0

    def dies(self, task_id: str) -> bool:
        """Its worker has. Gives whether it is to blame, and has ended."""
        task = self.tasks[task_id]
        if is_poison := task.die():
            self.let_go(task, num_served=task.num_tokens)
            task.owner = None
        return is_poison

    def put_back(self, task_id: str) -> None:
        task = self.tasks[task_id]
        self.let_go(task, num_served=0)
        self.fair.enter(task_id, task.waiting)
        task.owner = None

    def let_go(self, task: Expected, num_served: int) -> None:
        self.fair.charge(task.waiting.tenant, num_served - task.cost)

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
            suppress_health_check=list(HealthCheck),
        ),
    )
