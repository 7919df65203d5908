"""Leases beat by beat, against a real server, with a clock that the test moves."""

from typing import Any

import pytest
import redis

from tests.worker.fakes import SLUG, RecordingContext, submit
from tokenmill.protocol import keys
from tokenmill.protocol.records import TaskPhase
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.declarations import Timing
from worker.leases import Leases
from worker.ownership import Ownership


class LeasesHarness:
    """Leases without their thread. `fails`: whether `announce` finds no Redis."""

    def __init__(self, client: "redis.Redis", lease_seconds: float = 60.0) -> None:
        self.client = client
        self.fails = False
        self.num_announced = 0
        self.waits: list[float] = []
        self.context = RecordingContext(timing=Timing(lease_seconds=lease_seconds, stall_seconds=60.0))
        self.leases = Leases(TaskStore(client), self.context, self, self.waits.append)

    def announce(self) -> None:
        self.num_announced += 1
        if self.fails:
            raise redis.ConnectionError("away")

    def claim(self, lease_seconds: float = 60.0) -> Ownership:
        submit(self.client)
        (claimed,) = TaskStore(self.client).claim(SLUG, worker="w", max_tasks=1, lease_seconds=lease_seconds)
        ownership = Ownership(claimed.task_id, claimed.owner)
        self.context.owned_tasks.add(ownership)
        return ownership

    def lapse(self, ownership: Ownership) -> None:
        self.client.zadd(keys.LEASES, {ownership.task_id: 1})

    def lapses_at(self, ownership: Ownership) -> float:
        return float(self.client.zscore(keys.LEASES, ownership.task_id) or 0)


@pytest.fixture
def harness(redis_client: "redis.Redis") -> LeasesHarness:
    return LeasesHarness(redis_client)


def test_a_beat_renews_and_announces(harness: LeasesHarness) -> None:
    held = harness.claim()
    harness.lapse(held)
    harness.leases.turn()

    assert harness.lapses_at(held) > 1, "late, but no other worker had taken it"
    assert harness.context.lost == []
    assert (harness.num_announced, harness.waits) == (1, [1.0])


def test_short_leases_beat_three_times(redis_client: "redis.Redis") -> None:
    harness = LeasesHarness(redis_client, lease_seconds=0.6)
    harness.leases.turn()

    assert harness.waits == [pytest.approx(0.2)]


def test_a_stalled_loop_renews_nothing(harness: LeasesHarness) -> None:
    """docling-jobkit#102: a heartbeat went on while the work hung, and the job with it."""
    held = harness.claim()
    before = harness.lapses_at(held)
    harness.context.now = 61.0
    harness.leases.turn()

    assert harness.lapses_at(held) == before
    assert harness.num_announced == 1


def test_a_task_of_another_worker_is_dropped(harness: LeasesHarness) -> None:
    held, kept = harness.claim(), harness.claim()
    harness.client.hset(keys.run(held.task_id), "owner", "another")
    harness.leases.turn()

    assert (harness.context.lost, harness.context.cancelled) == ([held], [])
    assert harness.context.owned_tasks.owners() == dict([kept])


def test_a_cancelled_task_is_dropped_as_cancelled(harness: LeasesHarness) -> None:
    held = harness.claim()
    TaskStore(harness.client).cancel(held.task_id)
    harness.leases.turn()

    assert (harness.context.lost, harness.context.cancelled) == ([], [held])


def test_tasks_of_lapsed_leases_return_to_the_queue(
    harness: LeasesHarness, redis_client: "redis.Redis"
) -> None:
    dead = LeasesHarness(redis_client).claim()
    harness.lapse(dead)
    harness.leases.turn()

    assert harness.lapses_at(dead) == 0
    assert redis_client.hget(f"rq:job:{dead.task_id}", "status") == b"queued"


def test_after_an_outage_the_other_workers_get_one_lease_to_renew(
    harness: LeasesHarness, redis_client: "redis.Redis"
) -> None:
    """rq#1846: after a restart of Redis, jobs were taken from workers that were about to reconnect."""
    slow = LeasesHarness(redis_client).claim()
    harness.lapse(slow)
    harness.fails = True
    with pytest.raises(redis.ConnectionError):
        harness.leases.turn()
    harness.fails = False

    def is_reaped(seconds: float) -> bool:
        harness.context.now = seconds
        harness.context.watchdog.tick()
        harness.leases.turn()
        return harness.lapses_at(slow) == 0

    assert [is_reaped(seconds) for seconds in (1.0, 59.0, 60.0)] == [False, False, True]


def test_other_errors_are_not_swallowed(harness: LeasesHarness) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("a bug")

    harness.announce = broken  # type: ignore[method-assign] # an error of another kind
    with pytest.raises(ValueError, match="a bug"):
        harness.leases.turn()


@pytest.mark.parametrize("phase", ["untouched", "waiting", "seated", "alone"])
def test_a_beat_records_the_phase_of_each_task(harness: LeasesHarness, phase: TaskPhase) -> None:
    held = harness.claim()
    harness.context.phase = phase
    harness.leases.turn()

    assert harness.client.hget(keys.run(held.task_id), "standing") == phase.encode()


def test_a_poisonous_task_is_counted_and_not_returned(
    harness: LeasesHarness, redis_client: "redis.Redis"
) -> None:
    guilty = LeasesHarness(redis_client).claim()
    redis_client.hset(keys.run(guilty.task_id), mapping={"crashes": "o1=alone o2=alone ", "crashes_at": 0})
    redis_client.hset(keys.run(guilty.task_id), "standing", "alone")
    harness.lapse(guilty)
    harness.leases.turn()

    metrics = harness.context.exported
    assert (metrics.value("tasks_poisoned_total"), metrics.value("tasks_reclaimed_total")) == (1, 0)
    assert TaskStore(redis_client).queue_stats(SLUG).claimed == 0


def test_a_bad_record_is_counted_and_logged(
    harness: LeasesHarness, redis_client: "redis.Redis", caplog: pytest.LogCaptureFixture
) -> None:
    bad, lapsed = LeasesHarness(redis_client).claim(), LeasesHarness(redis_client).claim()
    redis_client.delete(f"rq:job:{bad.task_id}")
    redis_client.set(f"rq:job:{bad.task_id}", "x")
    for one in (bad, lapsed):
        harness.lapse(one)
    harness.leases.turn()

    assert harness.lapses_at(lapsed) == 0
    assert harness.context.exported.value("reap_failures_total") == 1
    assert bad.task_id in caplog.text


def test_a_lease_that_lapsed_in_an_outage_blames_no_task(
    harness: LeasesHarness, redis_client: "redis.Redis"
) -> None:
    """Its owner may have stopped normally and could not hand it back."""
    held = LeasesHarness(redis_client).claim()
    TaskStore(redis_client).renew({held.task_id: held.owner}, 60)
    harness.fails = True
    with pytest.raises(redis.ConnectionError):
        harness.leases.turn()
    harness.fails = False
    seconds, _ = redis_client.time()
    redis_client.zadd(keys.LEASES, {held.task_id: seconds - 1})
    harness.context.now = 60.0
    harness.context.watchdog.tick()
    harness.leases.turn()

    (again,) = TaskStore(redis_client).claim(SLUG, worker="w", max_tasks=1, lease_seconds=60)
    assert (again.task_id, again.suspect) == (held.task_id, False)
