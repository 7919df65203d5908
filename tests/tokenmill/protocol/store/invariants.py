"""Invariants of a store and its model, after every step (`INVARIANTS`) and once all tasks have ended."""

import copy
from collections import Counter

from rq import Queue

from tests.tokenmill.protocol.store.task_model import World
from tests.tokenmill.protocol.store.tasks import SLUG, snapshot_of
from tokenmill.protocol import keys
from tokenmill.protocol.messages import FinishedEvent
from tokenmill.protocol.naming import queue_name, tenant_hash


def every_task_is_queued_or_claimed_once(world: World) -> None:
    waiting = world.waiting()
    claimed = {task_id for task_id, task in world.tasks.items() if task.owner}
    listed: Counter[str] = Counter()
    for queue in {task.queue for task in world.tasks.values()}:
        order = [member.decode() for member in world.client.zrange(keys.order(queue), 0, -1)]
        assert Queue(queue, connection=world.client).job_ids == order
        listed.update(order)
    assert listed == Counter(waiting)
    assert {member.decode() for member in world.client.zrange(keys.LEASES, 0, -1)} == claimed
    composites = {
        member.decode()
        for queue in {task.queue for task in world.tasks.values()}
        for member in world.client.zrange(f"rq:wip:{queue}", 0, -1)
    }
    assert composites == {f"{task_id}:{world.tasks[task_id].owner}" for task_id in claimed}


def every_log_is_whole(world: World) -> None:
    for task_id, task in world.tasks.items():
        events = world.store.read_log(task_id)
        assert [event.seq for event in events] == list(range(task.num_tokens + (task.reason is not None)))
        ends = [event for event in events if isinstance(event, FinishedEvent)]
        assert [event.finish_reason for event in ends] == ([task.reason] if task.reason else [])
        assert all(event.done and event is events[-1] for event in ends)


def counts_add_up(world: World) -> None:
    stats = world.store.queue_stats(SLUG)
    reasons = Counter(task.reason for task in world.tasks.values() if task.reason)
    assert stats.totals.get("submitted", 0) == len(world.tasks)
    for reason in ("stop", "length", "error", "timeout", "cancelled"):
        assert stats.totals.get(f"finished:{reason}", 0) == reasons[reason]
    assert stats.totals.get("completion_tokens", 0) == sum(
        task.num_tokens for task in world.tasks.values() if task.reason
    )
    assert stats.waiting_cost == sum(world.tasks[task_id].cost for task_id in world.waiting())
    assert sum(stats.waiting.values()) == len(world.waiting())
    assert stats.claimed == sum(task.owner is not None for task in world.tasks.values())


def what_waits_is_counted(world: World) -> None:
    """The counters that submissions read are exact."""
    kept = world.client.hgetall(keys.waiting(SLUG)) | world.client.hgetall(keys.tenants(SLUG))
    assert {name.decode(): int(number) for name, number in kept.items()} == world.fair.num_waiting()


def tenants_are_charged_for_what_they_were_served(world: World) -> None:
    """Also after crashes, hand-backs and ends: the charge of a claim is corrected once."""
    kept = dict(world.client.zrange(keys.shares(SLUG), 0, -1, withscores=True))
    waiting = {tenant_hash(tenant): world.fair.counters[tenant] for tenant in world.fair.tenants()}
    assert {name.decode(): counter for name, counter in kept.items()} == waiting
    away = dict(world.client.zrange(keys.away(SLUG), 0, -1, withscores=True))
    away.pop(b":last", None)
    remembered = {tenant_hash(tenant): counter for tenant, counter in world.fair.counters.items()}
    rest = {name: counter for name, counter in remembered.items() if name not in waiting}
    assert {name.decode(): counter for name, counter in away.items()} == rest
    assert min((*kept.values(), *away.values()), default=0) >= 0


def the_index_has_the_waiting_queues(world: World) -> None:
    expected: dict[str, dict[str, float]] = {}
    heads = {}
    for (priority, tenant), (_, head) in world.fair.lines().items():
        accepted = int(world.client.hget(keys.run(head), "accepted_us"))
        queue = queue_name(SLUG, priority, tenant)
        heads[queue] = accepted
        expected.setdefault(f"{SLUG}:{priority}", {})[f"{accepted:020}{queue}"] = world.fair.counters[tenant]
    queues = world.client.zrange(keys.queues(SLUG), 0, -1, withscores=True)
    assert {name.decode(): score for name, score in queues} == heads
    assert {name.decode() for name in world.client.zrange(keys.unserved(SLUG), 0, -1)} == set(heads)
    for group in (f"{SLUG}:{priority}" for priority in range(5)):
        lines = world.client.zrange(keys.lines(group), 0, -1, withscores=True)
        assert {name.decode(): score for name, score in lines} == expected.get(group, {})
        of_class = world.client.zrange(keys.heads(group), 0, -1, withscores=True)
        assert {name.decode(): score for name, score in of_class} == {
            member[20:]: int(member[:20]) for member in expected.get(group, {})
        }


def positions_agree_with_the_claims(world: World) -> None:
    """Only the next task to be claimed has position 0; with one tenant the positions are a permutation."""
    snapshots = [snapshot_of(world.store, task_id) for task_id in world.waiting()]
    positions = sorted(snapshot.position or 0 for snapshot in snapshots)
    first = [snapshot.task_id for snapshot in snapshots if snapshot.position == 0]
    assert first == copy.deepcopy(world.fair).claim(1)
    if len(world.fair.tenants()) == 1:
        assert positions == list(range(len(snapshots)))
    for snapshot in snapshots:
        position, tokens_ahead = snapshot.position, snapshot.tokens_ahead
        assert position is not None
        assert tokens_ahead is not None
        assert (position == 0) <= (tokens_ahead == 0)
        total = sum(world.tasks[task_id].cost for task_id in world.waiting())
        assert position < len(snapshots)
        assert 0 <= tokens_ahead <= total - world.tasks[snapshot.task_id].cost


INVARIANTS = (
    every_task_is_queued_or_claimed_once,
    every_log_is_whole,
    counts_add_up,
    what_waits_is_counted,
    tenants_are_charged_for_what_they_were_served,
    the_index_has_the_waiting_queues,
    positions_agree_with_the_claims,
)


def only_expiring_keys_remain(world: World) -> None:
    """Checked once all tasks have ended."""
    assert world.client.pttl(keys.away(SLUG)) > 0 or not world.tasks
    kept = {key.decode().split(":")[1] for key in world.client.scan_iter("tokenmill:*")}
    assert kept <= {
        "run",
        "log",
        "totals",
        "pace",
        "rule",
        "clock",
        "shown",
        "away",
        "idem",
        "tasks",
        "ended",
    }
    kept_by_rq = {key.decode().split(":")[1] for key in world.client.scan_iter("rq:*")}
    assert kept_by_rq <= {"job", "results", "finished", "failed", "canceled", "queues"}
    for task_id in world.tasks:
        assert world.client.pttl(keys.run(task_id)) > 0


AFTER_THE_END = (
    every_task_is_queued_or_claimed_once,
    every_log_is_whole,
    counts_add_up,
    only_expiring_keys_remain,
)
"""Invariants once all tasks have ended; what was charged to whom no longer matters."""
