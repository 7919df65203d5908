"""Leases beat by beat: a real server, a clock that the test moves."""

import threading
from typing import Any

import pytest
import redis

from tests.worker.workshop import SLUG, new_metrics, submit
from tokenmill.protocol import keys
from tokenmill.protocol.records import TaskPhase
from tokenmill.protocol.store.task_store import TaskStore
from worker.leases import Leases
from worker.ownership import OwnedTasks, Ownership
from worker.watchdog import Watchdog


class Beats:
    """A lease thread without the thread. `store` may be told to fail."""

    def __init__(self, client: "redis.Redis", lease_seconds: float = 60.0) -> None:
        self.now = 0.0
        self.client = client
        self.fails = False
        self.announced = 0
        self.standing: TaskPhase = "seated"
        self.lost: list[Ownership] = []
        self.cancelled: list[Ownership] = []
        self.waits: list[float] = []
        self.owned_tasks = OwnedTasks(threading.Event())
        self.watchdog = Watchdog(60.0, lambda: self.now, on_tick=lambda: None, arm=lambda _: None)
        self.leases = Leases(
            TaskStore(client),
            self.owned_tasks,
            self.watchdog,
            new_metrics(),
            slug=SLUG,
            lease_seconds=lease_seconds,
            max_task_seconds=86400,
            announce=self.announce,
            on_lost=self.lose,
            on_cancelled=self.cancelled.append,
            phases=lambda owners: dict.fromkeys(owners, self.standing),
            clock=lambda: self.now,
            wait=self.waits.append,
        )

    def announce(self) -> None:
        self.announced += 1
        if self.fails:
            raise redis.ConnectionError("away")

    def lose(self, ownership: Ownership) -> None:
        self.lost.append(ownership)
        self.owned_tasks.drop(ownership)

    def claim(self, lease_seconds: float = 60.0) -> Ownership:
        submit(self.client)
        (claimed,) = TaskStore(self.client).claim(SLUG, worker="w", max_tasks=1, lease_seconds=lease_seconds)
        ownership = Ownership(claimed.task_id, claimed.owner)
        self.owned_tasks.take(ownership)
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

    assert beats.lapses_at(held) > 1, "late, but nobody had taken it"
    assert beats.lost == []
    assert (beats.announced, beats.waits) == (1, [1.0])


def test_short_leases_beat_three_times(redis_client: "redis.Redis") -> None:
    beats = Beats(redis_client, lease_seconds=0.6)
    beats.leases.turn()

    assert beats.waits == [pytest.approx(0.2)]


def test_a_stalled_loop_renews_nothing(beats: Beats) -> None:
    """docling-jobkit#102: a heartbeat went on while the work hung, and the job with it."""
    held = beats.claim()
    before = beats.lapses_at(held)
    beats.now = 61.0
    beats.leases.turn()

    assert beats.lapses_at(held) == before
    assert beats.announced == 1


def test_what_another_took_is_dropped(beats: Beats) -> None:
    held, kept = beats.claim(), beats.claim()
    beats.client.hset(keys.run(held.task_id), "owner", "another")
    beats.leases.turn()

    assert (beats.lost, beats.cancelled) == ([held], [])
    assert beats.owned_tasks.owners() == dict([kept])


def test_what_was_cancelled_is_told_apart(beats: Beats) -> None:
    held = beats.claim()
    TaskStore(beats.client).cancel(held.task_id)
    beats.leases.turn()

    assert (beats.lost, beats.cancelled) == ([], [held])


def test_lapsed_leases_of_others_go_back(beats: Beats, redis_client: "redis.Redis") -> None:
    dead = Beats(redis_client).claim()
    beats.lapse(dead)
    beats.leases.turn()

    assert beats.lapses_at(dead) == 0
    assert redis_client.hget(f"rq:job:{dead.task_id}", "status") == b"queued"


def test_after_a_lost_connection_the_others_get_a_lease_to_come_back(
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
        beats.now = seconds
        beats.watchdog.tick()
        beats.leases.turn()
        return beats.lapses_at(slow) == 0

    assert [is_reaped(seconds) for seconds in (1.0, 59.0, 60.0)] == [False, False, True]


def test_other_errors_are_not_swallowed(beats: Beats) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("a bug")

    beats.leases._announce = broken  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="a bug"):
        beats.leases.turn()


@pytest.mark.parametrize("standing", ["untouched", "waiting", "seated", "alone"])
def test_a_beat_records_how_each_task_stands(beats: Beats, standing: TaskPhase) -> None:
    held = beats.claim()
    beats.standing = standing
    beats.leases.turn()

    assert beats.client.hget(keys.run(held.task_id), "standing") == standing.encode()


def test_who_is_to_blame_is_counted_and_not_put_back(beats: Beats, redis_client: "redis.Redis") -> None:
    guilty = Beats(redis_client).claim()
    redis_client.hset(keys.run(guilty.task_id), mapping={"crashes": "o1=alone o2=alone ", "crashes_at": 0})
    redis_client.hset(keys.run(guilty.task_id), "standing", "alone")
    beats.lapse(guilty)
    beats.leases.turn()

    metrics = beats.leases._metrics
    assert (metrics._poisoned._value.get(), metrics._reclaimed._value.get()) == (1, 0)
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
    assert beats.leases._metrics._reap_failures._failures["leases"]._value.get() == 1
    assert bad.task_id in caplog.text


def test_an_outage_that_this_worker_saw_excuses_what_lapsed_in_it(
    beats: Beats, redis_client: "redis.Redis"
) -> None:
    """Its owner may have stopped in order, and could not hand it back."""
    held = Beats(redis_client).claim()
    TaskStore(redis_client).renew({held.task_id: held.owner}, 60)
    beats.fails = True
    with pytest.raises(redis.ConnectionError):
        beats.leases.turn()
    beats.fails = False
    seconds, _ = redis_client.time()
    redis_client.zadd(keys.LEASES, {held.task_id: seconds - 1})
    beats.now = 60.0
    beats.watchdog.tick()
    beats.leases.turn()

    (again,) = TaskStore(redis_client).claim(SLUG, worker="w", max_tasks=1, lease_seconds=60)
    assert (again.task_id, again.suspect) == (held.task_id, False)
