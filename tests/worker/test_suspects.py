"""Whole workers with suspects: each runs alone at first, and no other task runs meanwhile."""

import threading
from collections.abc import Callable, Mapping

import pytest
import redis

from engine.errors import DeviceLost
from engine.outputs import SchedulerOutputs
from tests.worker.fakes import (
    SLUG,
    FakeRunner,
    build_engine,
    claim_and_lapse,
    die_with_all,
    ended,
    expected_tokens,
    new_metrics,
    submit,
    tokens_of,
    until,
)
from tests.worker.running import running
from tokenmill.protocol import keys
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.declarations import Timing
from worker.batch_worker import EXIT_FAILED
from worker.intake import Intake

LENGTH = 6


class Watched(FakeRunner):
    """Records the tasks of each step. `gate` may block a step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[set[str]] = []
        self.gate: Callable[[set[str]], object] = lambda _: None

    def execute(self, outputs: SchedulerOutputs) -> None:
        ids = {item.sequence.request_id.partition(":")[0] for item in outputs.scheduled}
        if ids:
            self.steps.append(ids)
            self.gate(ids)
        super().execute(outputs)


def submit_some(client: "redis.Redis", count: int) -> list[str]:
    sampling = {"max_tokens": LENGTH, "temperature": 0}
    return [submit(client, prompt_token_ids=(number + 1,), sampling=sampling) for number in range(count)]


def test_every_suspect_runs_alone_until_a_token_is_stored(
    redis_url: str, redis_client: "redis.Redis"
) -> None:
    tasks = submit_some(redis_client, 5)
    die_with_all(redis_client)
    runner = Watched()

    metrics = new_metrics()
    with running(redis_url, build_engine(runner, max_num_seqs=3), metrics=metrics) as run:
        for number, one in enumerate(tasks):
            assert tokens_of(ended(redis_client, one)) == expected_tokens([number + 1], LENGTH)
        until(lambda: not run.context.owned_tasks, "no task is owned")
        suspected = metrics.value("tasks_suspected_total")

    assert suspected == 5
    for one in tasks:
        assert next(step for step in runner.steps if one in step) == {one}, "its first step"


def test_other_tasks_are_untouched_during_a_retry(redis_url: str, redis_client: "redis.Redis") -> None:
    suspect, other = submit_some(redis_client, 2)
    assert claim_and_lapse(redis_client, 1) == [suspect]
    TaskStore(redis_client).reap(SLUG, max_task_seconds=3600)
    runner, permit = Watched(), threading.Event()
    runner.gate = lambda ids: permit.wait(20) if ids == {suspect} else None

    with running(redis_url, build_engine(runner)):
        until(lambda: {suspect} in runner.steps, "it runs")
        phases = [redis_client.hget(keys.run(one), "standing") for one in (suspect, other)]
        permit.set()
        for number, one in enumerate((suspect, other)):
            assert tokens_of(ended(redis_client, one)) == expected_tokens([number + 1], LENGTH)

    assert phases == [b"alone", b"untouched"]


def test_a_cancelled_suspect_ends_its_retry(redis_url: str, redis_client: "redis.Redis") -> None:
    suspect, other = submit_some(redis_client, 2)
    claim_and_lapse(redis_client, 1)
    TaskStore(redis_client).reap(SLUG, max_task_seconds=3600)
    runner, permit = Watched(), threading.Event()
    runner.gate = lambda ids: permit.wait(20) if ids == {suspect} else None

    with running(redis_url, build_engine(runner)) as run:
        until(lambda: {suspect} in runner.steps, "it runs")
        TaskStore(redis_client).cancel(suspect)
        until(lambda: not run.context.isolation.is_running, "the retry is over")
        permit.set()
        assert tokens_of(ended(redis_client, other)) == expected_tokens([2], LENGTH)


def test_waiting_suspects_do_not_delay_the_shutdown(redis_url: str, redis_client: "redis.Redis") -> None:
    tasks = submit_some(redis_client, 3)
    die_with_all(redis_client)
    runner, permit = Watched(), threading.Event()
    runner.gate = lambda _: permit.wait(20)

    with running(redis_url, build_engine(runner), timing=Timing(grace_seconds=1000.0)) as run:
        until(lambda: runner.steps, "the first runs")
        run.worker.stop("a test")
        until(lambda: run.worker.state == "draining", "it drains")
        permit.set()
        assert run.wait() == 0

    assert len(ended(redis_client, tasks[0])) == LENGTH + 1
    again = TaskStore(redis_client).claim(SLUG, worker="next", max_tasks=9, lease_seconds=60)
    assert [(one.task_id, one.suspect) for one in again] == [(one, True) for one in tasks[1:]]


def test_a_dead_engine_counts_against_its_running_tasks(redis_url: str, redis_client: "redis.Redis") -> None:
    """A request's kernel breaks the device. The worker stops normally, and the next one would too."""
    (guilty,) = submit_some(redis_client, 1)
    runner = Watched()

    def lose(_: set[str]) -> None:
        raise DeviceLost("gone")

    runner.gate = lose
    with running(redis_url, build_engine(runner)) as run:
        assert run.wait() == EXIT_FAILED

    (again,) = TaskStore(redis_client).claim(SLUG, worker="next", max_tasks=1, lease_seconds=60)
    assert (again.task_id, again.suspect) == (guilty, True)


def test_no_renewal_undoes_the_crash_count(
    redis_url: str, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    """A renewal shows that the owner lives and removes its crash. It must not come after the hand-back."""
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


def test_a_failed_intake_counts_against_no_task(
    redis_url: str, redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch
) -> None:
    (innocent,) = submit_some(redis_client, 1)
    runner, permit = Watched(), threading.Event()
    runner.gate = lambda _: permit.wait(20)
    turn = Intake.turn

    def fail_later(self: Intake) -> None:
        if runner.steps:
            permit.set()
            raise RuntimeError("a bug")
        turn(self)

    monkeypatch.setattr("worker.intake.POLL_SECONDS", 0.01)
    monkeypatch.setattr(Intake, "turn", fail_later)
    monkeypatch.setattr("worker.publisher.Publisher.turn", lambda _: threading.Event().wait(0.01))
    with running(redis_url, build_engine(runner)) as run:
        assert run.wait() == EXIT_FAILED

    (again,) = TaskStore(redis_client).claim(SLUG, worker="next", max_tasks=1, lease_seconds=60)
    assert (again.task_id, again.suspect) == (innocent, False)
