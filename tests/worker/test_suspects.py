"""Whole workers with suspects: each runs alone for a while, and the others are not touched meanwhile."""

import threading
from collections.abc import Mapping

import pytest
import redis

from engine.errors import DeviceLost
from engine.outputs import SchedulerOutputs
from tests.worker.running import running
from tests.worker.workshop import (
    SLUG,
    FakeRunner,
    build_engine,
    claim_and_lapse,
    die_with_all,
    ended,
    new_metrics,
    submit,
    tokens_of,
    undisturbed,
    until,
)
from tokenmill.protocol import keys
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.processes import Timing
from worker.batch_worker import EXIT_FAILED
from worker.intake import Intake

LENGTH = 6


class Watched(FakeRunner):
    """Notes whom each step computed something of; `gate` may hold a step up."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[set[str]] = []
        self.gate = lambda _: None

    def execute(self, outputs: SchedulerOutputs) -> None:
        ids = {item.sequence.request_id.partition(":")[0] for item in outputs.scheduled}
        if ids:
            self.steps.append(ids)
            self.gate(ids)
        super().execute(outputs)


def submit_some(client: "redis.Redis", count: int) -> list[str]:
    sampling = {"max_tokens": LENGTH, "temperature": 0}
    return [submit(client, prompt_token_ids=(number + 1,), sampling=sampling) for number in range(count)]


def test_every_suspect_runs_alone_until_it_has_logged_a_token(
    redis_url: str, redis_client: "redis.Redis"
) -> None:
    tasks = submit_some(redis_client, 5)
    die_with_all(redis_client)
    runner = Watched()

    metrics = new_metrics()
    with running(redis_url, build_engine(runner, max_num_seqs=3), metrics=metrics) as run:
        for number, one in enumerate(tasks):
            assert tokens_of(ended(redis_client, one)) == undisturbed([number + 1], LENGTH)
        until(lambda: not run.context.owned_tasks, "nothing is held")
        suspected = metrics.value("tasks_suspected_total")

    assert suspected == 5
    for one in tasks:
        assert next(step for step in runner.steps if one in step) == {one}, "its first step"


def test_the_others_stand_as_untouched_while_one_is_tried(
    redis_url: str, redis_client: "redis.Redis"
) -> None:
    suspect, mate = submit_some(redis_client, 2)
    assert claim_and_lapse(redis_client, 1) == [suspect]
    TaskStore(redis_client).reap(SLUG, max_task_seconds=3600)
    runner, permit = Watched(), threading.Event()
    runner.gate = lambda ids: permit.wait(20) if ids == {suspect} else None

    with running(redis_url, build_engine(runner)):
        until(lambda: {suspect} in runner.steps, "it is tried")
        phases = [redis_client.hget(keys.run(one), "standing") for one in (suspect, mate)]
        permit.set()
        for number, one in enumerate((suspect, mate)):
            assert tokens_of(ended(redis_client, one)) == undisturbed([number + 1], LENGTH)

    assert phases == [b"alone", b"untouched"]


def test_a_suspect_that_is_cancelled_in_its_trial_ends_it(
    redis_url: str, redis_client: "redis.Redis"
) -> None:
    suspect, other = submit_some(redis_client, 2)
    claim_and_lapse(redis_client, 1)
    TaskStore(redis_client).reap(SLUG, max_task_seconds=3600)
    runner, permit = Watched(), threading.Event()
    runner.gate = lambda ids: permit.wait(20) if ids == {suspect} else None

    with running(redis_url, build_engine(runner)) as run:
        until(lambda: {suspect} in runner.steps, "it is tried")
        TaskStore(redis_client).cancel(suspect)
        until(lambda: not run.context.isolation.is_running, "the trial is over")
        permit.set()
        assert tokens_of(ended(redis_client, other)) == undisturbed([2], LENGTH)


def test_suspects_that_wait_do_not_hold_up_the_end(redis_url: str, redis_client: "redis.Redis") -> None:
    tasks = submit_some(redis_client, 3)
    die_with_all(redis_client)
    runner, permit = Watched(), threading.Event()
    runner.gate = lambda _: permit.wait(20)

    with running(redis_url, build_engine(runner), timing=Timing(grace_seconds=1000.0)) as run:
        until(lambda: runner.steps, "the first is tried")
        run.worker.stop("a test")
        until(lambda: run.worker.state == "draining", "it heard")
        permit.set()
        assert run.wait() == 0

    assert len(ended(redis_client, tasks[0])) == LENGTH + 1
    again = TaskStore(redis_client).claim(SLUG, worker="next", max_tasks=9, lease_seconds=60)
    assert [(one.task_id, one.suspect) for one in again] == [(one, True) for one in tasks[1:]]


def test_a_dead_engine_counts_against_what_it_had_in_hand(
    redis_url: str, redis_client: "redis.Redis"
) -> None:
    """One request's kernel costs the device, and the worker ends in good order; the next would too."""
    (guilty,) = submit_some(redis_client, 1)
    runner = Watched()

    def lose(_: set[str]) -> None:
        raise DeviceLost("gone")

    runner.gate = lose
    with running(redis_url, build_engine(runner)) as run:
        assert run.wait() == EXIT_FAILED

    (again,) = TaskStore(redis_client).claim(SLUG, worker="next", max_tasks=1, lease_seconds=60)
    assert (again.task_id, again.suspect) == (guilty, True)


def test_no_beat_takes_back_what_a_dead_engine_counted(
    redis_url: str, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner that renews lives, so its crash was none; after its hand-back this worker must not renew."""
    alive: list[bool] = []
    put_back = TaskStore.hand_back

    def watched(store: TaskStore, owned: Mapping[str, str], *, crashed: bool = False) -> int:
        alive.append(any(one.name == "leases" and one.is_alive() for one in threading.enumerate()))
        return put_back(store, owned, crashed=crashed)

    monkeypatch.setattr(TaskStore, "hand_back", watched)
    runner = Watched()

    def die(_: set[str]) -> None:
        raise DeviceLost("an illegal memory access was encountered")

    runner.gate = die
    submit_some(redis_client, 2)
    with running(redis_url, build_engine(runner)) as run:
        assert run.wait() == EXIT_FAILED
    assert alive == [False]


def test_a_thread_that_fails_counts_against_nobody(
    redis_url: str, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    (innocent,) = submit_some(redis_client, 1)
    runner, permit = Watched(), threading.Event()
    runner.gate = lambda _: permit.wait(20)
    turn = Intake.turn

    def fail_later(self: Intake) -> None:
        if runner.steps:
            permit.set()
            raise RuntimeError("a fault of ours")
        turn(self)

    monkeypatch.setattr("worker.intake.POLL_SECONDS", 0.01)
    monkeypatch.setattr(Intake, "turn", fail_later)
    monkeypatch.setattr("worker.publisher.Publisher.turn", lambda _: threading.Event().wait(0.01))
    with running(redis_url, build_engine(runner)) as run:
        assert run.wait() == EXIT_FAILED

    (again,) = TaskStore(redis_client).claim(SLUG, worker="next", max_tasks=1, lease_seconds=60)
    assert (again.task_id, again.suspect) == (innocent, False)
