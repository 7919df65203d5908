"""Suspects are tried alone: who waits for whom, and what is recorded of whom meanwhile."""

import threading
from collections.abc import Mapping
from typing import Any

import pytest
import redis

from tests.worker.intake_gate import Gate
from tests.worker.workshop import die_with_all, ended, submit
from tokenmill.protocol import keys
from tokenmill.protocol.records import Claimed, TaskPhase
from tokenmill.protocol.store.task_store import TaskStore
from worker.inbox import Inbox, Message, PreparedTask, Quiesce, Resume, RetryIsolated
from worker.isolation import IsolatedRetries
from worker.ownership import Ownership

LENGTH = 6
A, B, C = Ownership("a", "o1"), Ownership("b", "o2"), Ownership("c", "o3")
OWNERS = dict([A, B, C])


def task(ownership: Ownership, **fields: Any) -> Claimed:
    values = {"attempt": 2, "queue": "q", "priority": 2, "accepted_at": 0.0, "data": b"", "suspect": True}
    return Claimed(task_id=ownership.task_id, owner=ownership.owner, **(values | fields))


class Court:
    """IsolatedRetries without threads: what they tell the loop can be looked at."""

    def __init__(self) -> None:
        self.now = 0.0
        self.inbox = Inbox()
        self.wake = threading.Event()
        self.trials = IsolatedRetries(self.inbox, self.wake, lambda: self.now)
        self.prepared: list[float] = []

    def told(self) -> list[Message]:
        return self.inbox.take(0.0)

    def quiesce(self, ownership: Ownership) -> None:
        assert not self.trials.quiesce(ownership, 0.0)
        (quiesce,) = self.told()
        assert isinstance(quiesce, Quiesce)
        quiesce.heard.set()
        assert self.trials.quiesce(ownership, 0.0)

    def begin(self, ownership: Ownership) -> RetryIsolated:
        self.quiesce(ownership)
        assert self.trials.begin(ownership, self.prepared.append)
        (message,) = self.told()
        assert isinstance(message, RetryIsolated)
        return message

    def phases(self) -> Mapping[str, TaskPhase]:
        return self.trials.phases(OWNERS, {C.request_id})


@pytest.fixture
def court() -> Court:
    court = Court()
    court.trials.add(task(A))
    court.trials.add(task(B))
    return court


def test_the_loop_is_asked_once_and_nothing_is_recorded_before_it_has_heard(court: Court) -> None:
    for _ in range(3):
        assert not court.trials.quiesce(A, 0.0)
        assert court.trials.is_pending
        assert court.phases() == {"a": "untouched", "b": "untouched", "c": "waiting"}
    (quiesce,) = court.told()
    assert isinstance(quiesce, Quiesce)
    quiesce.heard.set()

    assert court.trials.quiesce(A, 0.0)
    assert court.phases() == {"a": "alone", "b": "untouched", "c": "untouched"}
    assert not court.trials.is_running
    assert court.told() == []


def test_one_that_is_in_no_line_is_taken_to_be_touched(court: Court) -> None:
    assert court.trials.phases(OWNERS, set())["c"] == "seated"


def test_one_after_the_other(court: Court) -> None:
    assert court.trials.next_suspect() == task(A)
    court.begin(A)
    assert court.trials.is_running
    assert court.trials.num_waiting == 1
    court.trials.finish(A)

    assert court.told() == [Resume(A)]
    assert court.wake.is_set()
    assert court.phases() == {"a": "seated", "b": "untouched", "c": "waiting"}
    assert not court.trials.is_pending
    assert court.trials.next_suspect() == task(B)
    court.begin(B)
    assert court.trials.next_suspect() is None


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
        court.trials.quiesce(A, 0.0)
    elif stage == "quiet":
        court.quiesce(A)
    court.told()
    court.trials.finish(A)

    assert court.told() == ([] if stage == "waiting" else [Resume(A)]), "the loop goes on"
    assert not court.trials.begin(A, court.prepared.append)
    assert not court.trials.quiesce(A, 0.0)
    assert court.told() == []
    assert court.trials.next_suspect() == task(B)


def test_what_others_come_to_is_no_matter(court: Court) -> None:
    court.begin(A)
    court.trials.finish(C)
    court.trials.finish(Ownership("a", "another attempt"))

    assert court.told() == []
    assert court.phases()["a"] == "alone"


def test_nothing_begins_before_the_loop_is_silent_and_nothing_begins_twice(court: Court) -> None:
    assert not court.trials.begin(A, court.prepared.append), "nobody was asked"
    court.trials.quiesce(A, 0.0)
    court.told()
    assert not court.trials.begin(A, court.prepared.append), "the loop has not heard"
    court.trials.finish(A)
    court.told()

    court.begin(B)
    assert not court.trials.begin(B, court.prepared.append)
    assert court.told() == []


def test_one_that_could_not_be_recorded_stays_quiet(court: Court) -> None:
    court.quiesce(A)
    assert court.trials.quiesce(A, 0.0)
    assert not court.trials.quiesce(B, 0.0), "another's turn"
    assert court.phases() == {"a": "alone", "b": "untouched", "c": "untouched"}
    assert court.trials.begin(A, court.prepared.append)


@pytest.mark.parametrize("stage", ["waiting", "asked", "quiet", "begun"])
def test_when_no_more_trials_come_the_loop_waits_for_none(court: Court, stage: str) -> None:
    if stage == "asked":
        court.trials.quiesce(A, 0.0)
    elif stage == "quiet":
        court.quiesce(A)
    elif stage == "begun":
        court.begin(A)
    court.told()
    court.trials.close()

    assert court.told() == ([Resume(A)] if stage in ("asked", "quiet") else []), "one that has begun is tried"
    assert not court.trials.quiesce(B, 0.0)
    assert court.told() == []
    assert court.trials.num_waiting == (1 if stage == "begun" else 2)
    if stage != "begun":
        # Also where it is recorded: the turn that was to begin it may have failed, and no other comes.
        assert not court.trials.begin(A, court.prepared.append)


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


@pytest.fixture
def trying(redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch) -> Trying:
    monkeypatch.setattr("worker.intake.POLL_SECONDS", 0.0)
    return Trying(redis_client)


def test_suspects_wait_and_the_others_go_on_meanwhile(trying: Trying) -> None:
    prepared, quiesce = trying.look()

    assert isinstance(prepared, PreparedTask)
    assert prepared.ownership.task_id == trying.other
    assert isinstance(quiesce, Quiesce)
    assert quiesce.ownership.task_id == trying.suspects[0]
    assert trying.standing(trying.suspects[0]) == "untouched", "nothing is recorded yet"


def test_a_trial_is_recorded_before_it_begins(trying: Trying) -> None:
    *_, quiesce = trying.look()
    assert isinstance(quiesce, Quiesce)
    quiesce.heard.set()
    (trial,) = trying.look()

    assert isinstance(trial, RetryIsolated)
    assert trial.ownership.task_id == trying.suspects[0]
    phases = [trying.standing(one) for one in (*trying.suspects, trying.other)]
    assert phases == ["alone", "untouched", "untouched"]
    prepared = trial.prepare()
    assert prepared is not None
    assert prepared.ownership == trial.ownership


def test_nothing_is_claimed_while_one_is_tried_or_soon_will_be(trying: Trying) -> None:
    *_, quiesce = trying.look()
    late = submit(trying.client)
    assert trying.look() == [], "the loop has not heard"
    assert isinstance(quiesce, Quiesce)
    quiesce.heard.set()
    trying.look()
    assert trying.look() == [], "it is tried"
    assert not trying.client.hexists(keys.run(late), "owner")

    trying.context.isolation.finish(quiesce.ownership)
    resume, prepared, again = trying.look()
    assert resume == Resume(quiesce.ownership)
    assert isinstance(prepared, PreparedTask), "others have a turn between two trials"
    assert isinstance(again, Quiesce)
    assert again.ownership.task_id == trying.suspects[1]


def test_without_redis_nothing_is_tried(trying: Trying, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, quiesce = trying.look()
    assert isinstance(quiesce, Quiesce)
    quiesce.heard.set()

    def fail(*_: object) -> None:
        raise redis.ConnectionError("away")

    with monkeypatch.context() as patched:
        patched.setattr(trying.store, "renew", fail)
        for _ in range(3):
            with pytest.raises(redis.ConnectionError):
                trying.intake.turn()
        assert trying.inbox.take(0.0) == []
    (trial,) = trying.look()
    assert isinstance(trial, RetryIsolated)


@pytest.mark.parametrize("how", ["lost", "cancelled"])
def test_one_that_turns_out_to_be_gone_is_not_tried(trying: Trying, how: str) -> None:
    *_, quiesce = trying.look()
    assert isinstance(quiesce, Quiesce)
    quiesce.heard.set()
    if how == "lost":
        trying.client.hset(keys.run(quiesce.ownership.task_id), "owner", "another")
    else:
        TaskStore(trying.client).cancel(quiesce.ownership.task_id)

    assert trying.look() == [Resume(quiesce.ownership)]


def test_a_suspect_that_cannot_be_prepared_ends_its_trial(redis_client: "redis.Redis") -> None:
    bad = submit(redis_client, prompt_token_ids=(1,), sampling={"max_tokens": 3, "temperature": -1})
    die_with_all(redis_client)
    gate = Gate(redis_client)
    gate.intake.turn()
    (quiesce,) = gate.inbox.take(0.0)
    assert isinstance(quiesce, Quiesce)
    quiesce.heard.set()
    gate.intake.turn()
    (trial,) = gate.inbox.take(0.0)
    assert isinstance(trial, RetryIsolated)

    assert trial.prepare() is None
    gate.publisher.turn()
    assert gate.inbox.take(0.0) == [Resume(quiesce.ownership)]
    assert ended(redis_client, bad)
