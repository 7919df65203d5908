"""Suspects are tried alone: who waits for whom, and what is recorded of whom meanwhile."""

import threading
from collections.abc import Mapping
from typing import Any

import pytest
import redis

from engine.errors import DeviceLost
from engine.outputs import SchedulerOutputs
from tests.worker.running import running
from tests.worker.test_intake import Gate
from tests.worker.workshop import (
    SLUG,
    FakeRunner,
    build_engine,
    ended,
    submit,
    tokens_of,
    undisturbed,
    until,
)
from worker.batch_worker import EXIT_FAILED
from worker.inbox import Arrival, Hush, Inbox, Message, Resume, Try
from worker.intake import Intake
from worker.ownership import Ownership
from worker.protocol import keys
from worker.protocol.records import Standing
from worker.protocol.store import Claimed, TaskStore
from worker.settings import Timing
from worker.trials import Trials

LENGTH = 6
A, B, C = Ownership("a", "o1"), Ownership("b", "o2"), Ownership("c", "o3")
OWNERS = dict([A, B, C])


def task(ownership: Ownership, **fields: Any) -> Claimed:
    values = {"attempt": 2, "queue": "q", "priority": 2, "accepted_at": 0.0, "data": b"", "suspect": True}
    return Claimed(task_id=ownership.task_id, owner=ownership.owner, **(values | fields))


class Court:
    """Trials without threads: what they tell the loop can be looked at."""

    def __init__(self) -> None:
        self.now = 0.0
        self.inbox = Inbox()
        self.wake = threading.Event()
        self.trials = Trials(self.inbox, self.wake, lambda: self.now)
        self.prepared: list[float] = []

    def told(self) -> list[Message]:
        return self.inbox.take(0.0)

    def quieten(self, ownership: Ownership) -> None:
        assert not self.trials.quieten(ownership, 0.0)
        (hush,) = self.told()
        assert isinstance(hush, Hush)
        hush.heard.set()
        assert self.trials.quieten(ownership, 0.0)

    def begin(self, ownership: Ownership) -> Try:
        self.quieten(ownership)
        assert self.trials.begin(ownership, self.prepared.append)
        (message,) = self.told()
        assert isinstance(message, Try)
        return message

    def standings(self) -> Mapping[str, Standing]:
        return self.trials.standings(OWNERS, {C.request_id})


@pytest.fixture
def court() -> Court:
    court = Court()
    court.trials.add(task(A))
    court.trials.add(task(B))
    return court


def test_the_loop_is_asked_once_and_nothing_is_recorded_before_it_has_heard(court: Court) -> None:
    for _ in range(3):
        assert not court.trials.quieten(A, 0.0)
        assert court.trials.is_pending
        assert court.standings() == {"a": "untouched", "b": "untouched", "c": "waiting"}
    (hush,) = court.told()
    assert isinstance(hush, Hush)
    hush.heard.set()

    assert court.trials.quieten(A, 0.0)
    assert court.standings() == {"a": "alone", "b": "untouched", "c": "untouched"}
    assert not court.trials.is_on
    assert court.told() == []


def test_one_that_is_in_no_line_is_taken_to_be_touched(court: Court) -> None:
    assert court.trials.standings(OWNERS, set())["c"] == "seated"


def test_one_after_the_other(court: Court) -> None:
    assert court.trials.next() == task(A)
    court.begin(A)
    assert court.trials.is_on
    assert court.trials.num_waiting == 1
    court.trials.finish(A)

    assert court.told() == [Resume(A)]
    assert court.wake.is_set()
    assert court.standings() == {"a": "seated", "b": "untouched", "c": "waiting"}
    assert not court.trials.is_pending
    assert court.trials.next() == task(B)
    court.begin(B)
    assert court.trials.next() is None


def test_its_time_runs_while_it_waits_for_its_turn(court: Court) -> None:
    court.now = 7.0
    trial = court.begin(A)
    assert court.prepared == [], "whoever begins it prepares nothing"
    court.now = 8.0
    trial.prepare()

    assert court.prepared == [8.0]


@pytest.mark.parametrize("stage", ["waiting", "asked", "quiet"])
def test_one_that_is_lost_or_cancelled_before_its_trial_is_not_tried(court: Court, stage: str) -> None:
    if stage == "asked":
        court.trials.quieten(A, 0.0)
    elif stage == "quiet":
        court.quieten(A)
    court.told()
    court.trials.finish(A)

    assert court.told() == ([] if stage == "waiting" else [Resume(A)]), "the loop goes on"
    assert not court.trials.begin(A, court.prepared.append)
    assert not court.trials.quieten(A, 0.0)
    assert court.told() == []
    assert court.trials.next() == task(B)


def test_what_others_come_to_is_no_matter(court: Court) -> None:
    court.begin(A)
    court.trials.finish(C)
    court.trials.finish(Ownership("a", "another attempt"))

    assert court.told() == []
    assert court.standings()["a"] == "alone"


# The thread that claims and prepares, against a real server.


class Trying(Gate):
    """An intake that finds two suspects and a new task; the test is the loop."""

    def __init__(self, client: "redis.Redis") -> None:
        self.suspects = [submit(client) for _ in range(2)]
        die_with_all(client)
        self.other = submit(client)
        super().__init__(client)

    def look(self) -> list[Message]:
        self.intake.turn()
        return self.inbox.take(0.0)

    def standing(self, task_id: str) -> str:
        return str(self.client.hget(keys.run(task_id), "standing").decode())


def die_with_all(client: "redis.Redis") -> None:
    """A worker claims all that waits, and dies."""
    store = TaskStore(client)
    store.claim(SLUG, worker="dead", max_tasks=100, lease_seconds=-1)
    store.reap(SLUG, max_task_seconds=3600)


@pytest.fixture
def trying(redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch) -> Trying:
    monkeypatch.setattr("worker.intake.POLL_SECONDS", 0.0)
    return Trying(redis_client)


def test_suspects_wait_and_the_others_go_on_meanwhile(trying: Trying) -> None:
    arrival, hush = trying.look()

    assert isinstance(arrival, Arrival)
    assert arrival.ownership.task_id == trying.other
    assert isinstance(hush, Hush)
    assert hush.ownership.task_id == trying.suspects[0]
    assert trying.standing(trying.suspects[0]) == "untouched", "nothing is recorded yet"


def test_a_trial_is_recorded_before_it_begins(trying: Trying) -> None:
    *_, hush = trying.look()
    assert isinstance(hush, Hush)
    hush.heard.set()
    (trial,) = trying.look()

    assert isinstance(trial, Try)
    assert trial.ownership.task_id == trying.suspects[0]
    standings = [trying.standing(one) for one in (*trying.suspects, trying.other)]
    assert standings == ["alone", "untouched", "untouched"]
    arrival = trial.prepare()
    assert arrival is not None
    assert arrival.ownership == trial.ownership


def test_nothing_is_claimed_while_one_is_tried_or_soon_will_be(trying: Trying) -> None:
    *_, hush = trying.look()
    late = submit(trying.client)
    assert trying.look() == [], "the loop has not heard"
    assert isinstance(hush, Hush)
    hush.heard.set()
    trying.look()
    assert trying.look() == [], "it is tried"
    assert not trying.client.hexists(keys.run(late), "owner")

    trying.trials.finish(hush.ownership)
    resume, arrival, again = trying.look()
    assert resume == Resume(hush.ownership)
    assert isinstance(arrival, Arrival), "others have a turn between two trials"
    assert isinstance(again, Hush)
    assert again.ownership.task_id == trying.suspects[1]


def test_without_redis_nothing_is_tried(trying: Trying, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, hush = trying.look()
    assert isinstance(hush, Hush)
    hush.heard.set()

    def fail(*_: object) -> None:
        raise redis.ConnectionError("away")

    with monkeypatch.context() as patched:
        patched.setattr(trying.intake._store, "renew", fail)
        for _ in range(3):
            with pytest.raises(redis.ConnectionError):
                trying.intake.turn()
        assert trying.inbox.take(0.0) == []
    (trial,) = trying.look()
    assert isinstance(trial, Try)


@pytest.mark.parametrize("how", ["lost", "cancelled"])
def test_one_that_turns_out_to_be_gone_is_not_tried(trying: Trying, how: str) -> None:
    *_, hush = trying.look()
    assert isinstance(hush, Hush)
    hush.heard.set()
    if how == "lost":
        trying.client.hset(keys.run(hush.ownership.task_id), "owner", "another")
    else:
        TaskStore(trying.client).cancel(hush.ownership.task_id)

    assert trying.look() == [Resume(hush.ownership)]


def test_a_suspect_that_cannot_be_prepared_ends_its_trial(redis_client: "redis.Redis") -> None:
    bad = submit(redis_client, prompt_token_ids=(1,), sampling={"max_tokens": 3, "temperature": -1})
    die_with_all(redis_client)
    gate = Gate(redis_client)
    gate.intake.turn()
    (hush,) = gate.inbox.take(0.0)
    assert isinstance(hush, Hush)
    hush.heard.set()
    gate.intake.turn()
    (trial,) = gate.inbox.take(0.0)
    assert isinstance(trial, Try)

    assert trial.prepare() is None
    gate.publisher.turn()
    assert gate.inbox.take(0.0) == [Resume(hush.ownership)]
    assert ended(redis_client, bad)


# Whole workers.


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

    with running(redis_url, build_engine(runner, max_num_seqs=3)) as run:
        for number, one in enumerate(tasks):
            assert tokens_of(ended(redis_client, one)) == undisturbed([number + 1], LENGTH)
        until(lambda: not run.worker._crew.holdings, "nothing is held")
        suspected = run.worker._given.metrics._suspected._value.get()

    assert suspected == 5
    for one in tasks:
        assert next(step for step in runner.steps if one in step) == {one}, "its first step"


def test_the_others_stand_as_untouched_while_one_is_tried(
    redis_url: str, redis_client: "redis.Redis"
) -> None:
    suspect, mate = submit_some(redis_client, 2)
    held = TaskStore(redis_client).claim(SLUG, worker="dead", max_tasks=1, lease_seconds=-1)
    assert [one.task_id for one in held] == [suspect]
    TaskStore(redis_client).reap(SLUG, max_task_seconds=3600)
    runner, permit = Watched(), threading.Event()
    runner.gate = lambda ids: permit.wait(20) if ids == {suspect} else None

    with running(redis_url, build_engine(runner)):
        until(lambda: {suspect} in runner.steps, "it is tried")
        standings = [redis_client.hget(keys.run(one), "standing") for one in (suspect, mate)]
        permit.set()
        for number, one in enumerate((suspect, mate)):
            assert tokens_of(ended(redis_client, one)) == undisturbed([number + 1], LENGTH)

    assert standings == [b"alone", b"untouched"]


def test_a_suspect_that_is_cancelled_in_its_trial_ends_it(
    redis_url: str, redis_client: "redis.Redis"
) -> None:
    suspect, other = submit_some(redis_client, 2)
    TaskStore(redis_client).claim(SLUG, worker="dead", max_tasks=1, lease_seconds=-1)
    TaskStore(redis_client).reap(SLUG, max_task_seconds=3600)
    runner, permit = Watched(), threading.Event()
    runner.gate = lambda ids: permit.wait(20) if ids == {suspect} else None

    with running(redis_url, build_engine(runner)) as run:
        until(lambda: {suspect} in runner.steps, "it is tried")
        TaskStore(redis_client).cancel(suspect)
        until(lambda: not run.worker._crew.trials.is_on, "the trial is over")
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
        until(lambda: run.worker.condition == "draining", "it heard")
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
