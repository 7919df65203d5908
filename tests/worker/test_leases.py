"""Leases beat by beat, against a real server, with a clock that the test moves."""

from typing import Any

import pytest
import redis

from tests.worker.workshop import SLUG, RecordingContext, submit
from tokenmill.protocol import keys
from tokenmill.protocol.records import TaskPhase
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.processes import Timing
from worker.leases import Leases
from worker.ownership import Ownership


class Beats:
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
def beats(redis_client: "redis.Redis") -> Beats:
    return Beats(redis_client)


def test_a_beat_renews_and_announces(beats: Beats) -> None:
    held = beats.claim()
    beats.lapse(held)
    beats.leases.turn()

    assert beats.lapses_at(held) > 1, "late, but no other worker had taken it"
    assert beats.context.lost == []
    assert (beats.num_announced, beats.waits) == (1, [1.0])


def test_short_leases_beat_three_times(redis_client: "redis.Redis") -> None:
    beats = Beats(redis_client, lease_seconds=0.6)
    beats.leases.turn()

    assert beats.waits == [pytest.approx(0.2)]


def test_a_stalled_loop_renews_nothing(beats: Beats) -> None:
    """docling-jobkit#102: a heartbeat went on while the work hung, and the job with it."""
    held = beats.claim()
    before = beats.lapses_at(held)
    beats.context.now = 61.0
    beats.leases.turn()

    assert beats.lapses_at(held) == before
    assert beats.num_announced == 1


def test_a_task_of_another_worker_is_dropped(beats: Beats) -> None:
    held, kept = beats.claim(), beats.claim()
    beats.client.hset(keys.run(held.task_id), "owner", "another")
    beats.leases.turn()

    assert (beats.context.lost, beats.context.cancelled) == ([held], [])
    assert beats.context.owned_tasks.owners() == dict([kept])


def test_a_cancelled_task_is_dropped_as_cancelled(beats: Beats) -> None:
    held = beats.claim()
    TaskStore(beats.client).cancel(held.task_id)
    beats.leases.turn()

    assert (beats.context.lost, beats.context.cancelled) == ([], [held])


def test_tasks_of_lapsed_leases_return_to_the_queue(beats: Beats, redis_client: "redis.Redis") -> None:
    dead = Beats(redis_client).claim()
    beats.lapse(dead)
    beats.leases.turn()

    assert beats.lapses_at(dead) == 0
    assert redis_client.hget(f"rq:job:{dead.task_id}", "status") == b"queued"


def test_after_an_outage_the_other_workers_get_one_lease_to_renew(
    beats: Beats, redis_client: "redis.Redis"
) -> None:
    """rq#1846: after a restart of Redis, jobs were taken from workers that were about to reconnect."""
    slow = Beats(redis_client).claim()
    beats.lapse(slow)
    beats.fails = True
    with pytest.raises(redis.ConnectionError):
        beats.leases.turn()
    beats.fails = False

    def is_reaped(seconds: float) -> bool:
        beats.context.now = seconds
        beats.context.watchdog.tick()
        beats.leases.turn()
        return beats.lapses_at(slow) == 0

    assert [is_reaped(seconds) for seconds in (1.0, 59.0, 60.0)] == [False, False, True]


def test_other_errors_are_not_swallowed(beats: Beats) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("a bug")

    beats.announce = broken  # type: ignore[method-assign] # an error of another kind
    with pytest.raises(ValueError, match="a bug"):
        beats.leases.turn()


@pytest.mark.parametrize("phase", ["untouched", "waiting", "seated", "alone"])
def test_a_beat_records_the_phase_of_each_task(beats: Beats, phase: TaskPhase) -> None:
    held = beats.claim()
    beats.context.phase = phase
    beats.leases.turn()

    assert beats.client.hget(keys.run(held.task_id), "standing") == phase.encode()


def test_a_poisonous_task_is_counted_and_not_returned(beats: Beats, redis_client: "redis.Redis") -> None:
    guilty = Beats(redis_client).claim()
    redis_client.hset(keys.run(guilty.task_id), mapping={"crashes": "o1=alone o2=alone ", "crashes_at": 0})
    redis_client.hset(keys.run(guilty.task_id), "standing", "alone")
    beats.lapse(guilty)
    beats.leases.turn()

    metrics = beats.context.exported
    assert (metrics.value("tasks_poisoned_total"), metrics.value("tasks_reclaimed_total")) == (1, 0)
    assert TaskStore(redis_client).queue_stats(SLUG).claimed == 0


def test_a_bad_record_is_counted_and_logged(
    beats: Beats, redis_client: "redis.Redis", caplog: pytest.LogCaptureFixture
) -> None:
    bad, lapsed = Beats(redis_client).claim(), Beats(redis_client).claim()
    redis_client.delete(f"rq:job:{bad.task_id}")
    redis_client.set(f"rq:job:{bad.task_id}", "x")
    for one in (bad, lapsed):
        beats.lapse(one)
    beats.leases.turn()

    assert beats.lapses_at(lapsed) == 0
    assert beats.context.exported.value("reap_failures_total") == 1
    assert bad.task_id in caplog.text


def test_a_lease_that_lapsed_in_an_outage_blames_no_task(beats: Beats, redis_client: "redis.Redis") -> None:
    """Its owner may have stopped normally and could not hand it back."""
    held = Beats(redis_client).claim()
    TaskStore(redis_client).renew({held.task_id: held.owner}, 60)
    beats.fails = True
    with pytest.raises(redis.ConnectionError):
        beats.leases.turn()
    beats.fails = False
    seconds, _ = redis_client.time()
    redis_client.zadd(keys.LEASES, {held.task_id: seconds - 1})
    beats.context.now = 60.0
    beats.context.watchdog.tick()
    beats.leases.turn()

    (again,) = TaskStore(redis_client).claim(SLUG, worker="w", max_tasks=1, lease_seconds=60)
    assert (again.task_id, again.suspect) == (held.task_id, False)
