"""Isolated retries of suspects: their order, and the recorded phases of all tasks meanwhile."""

import threading
from collections.abc import Mapping
from typing import Any

import pytest
import redis

from tests.worker.fakes import die_with_all, ended, submit
from tests.worker.intake_harness import IntakeHarness
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
    values: dict[str, Any] = {
        "attempt": 2,
        "queue": "q",
        "priority": 2,
        "accepted_at": 0.0,
        "data": b"",
        "suspect": True,
    }
    return Claimed(task_id=ownership.task_id, owner=ownership.owner, **(values | fields))


class RetriesHarness:
    """IsolatedRetries without threads, with the messages to the loop."""

    def __init__(self) -> None:
        self.now = 0.0
        self.inbox = Inbox()
        self.wake = threading.Event()
        self.retries = IsolatedRetries(self.inbox, self.wake, lambda: self.now)
        self.prepared: list[float] = []

    def take_messages(self) -> list[Message]:
        return self.inbox.take(0.0)

    def quiesce(self, ownership: Ownership) -> None:
        assert not self.retries.quiesce(ownership, 0.0)
        (quiesce,) = self.take_messages()
        assert isinstance(quiesce, Quiesce)
        quiesce.heard.set()
        assert self.retries.quiesce(ownership, 0.0)

    def begin(self, ownership: Ownership) -> RetryIsolated:
        self.quiesce(ownership)
        assert self.retries.begin(ownership, self.prepared.append)
        (message,) = self.take_messages()
        assert isinstance(message, RetryIsolated)
        return message

    def phases(self) -> Mapping[str, TaskPhase]:
        return self.retries.phases(OWNERS, {C.request_id})


@pytest.fixture
def harness() -> RetriesHarness:
    harness = RetriesHarness()
    harness.retries.add(task(A))
    harness.retries.add(task(B))
    return harness


def test_the_loop_is_asked_once_and_phases_change_after_its_reply(harness: RetriesHarness) -> None:
    for _ in range(3):
        assert not harness.retries.quiesce(A, 0.0)
        assert harness.retries.is_pending
        assert harness.phases() == {"a": "untouched", "b": "untouched", "c": "waiting"}
    (quiesce,) = harness.take_messages()
    assert isinstance(quiesce, Quiesce)
    quiesce.heard.set()

    assert harness.retries.quiesce(A, 0.0)
    assert harness.phases() == {"a": "alone", "b": "untouched", "c": "untouched"}
    assert not harness.retries.is_running
    assert harness.take_messages() == []


def test_a_task_that_does_not_wait_counts_as_seated(harness: RetriesHarness) -> None:
    assert harness.retries.phases(OWNERS, set())["c"] == "seated"


def test_suspects_run_one_after_another(harness: RetriesHarness) -> None:
    assert harness.retries.next_suspect() == task(A)
    harness.begin(A)
    assert harness.retries.is_running
    assert harness.retries.num_waiting == 1
    harness.retries.finish(A)

    assert harness.take_messages() == [Resume(A)]
    assert harness.wake.is_set()
    assert harness.phases() == {"a": "seated", "b": "untouched", "c": "waiting"}
    assert not harness.retries.is_pending
    assert harness.retries.next_suspect() == task(B)
    harness.begin(B)
    assert harness.retries.next_suspect() is None


def test_waiting_for_the_retry_counts_as_waiting(harness: RetriesHarness) -> None:
    harness.now = 7.0
    retry = harness.begin(A)
    assert harness.prepared == [], "only the loop prepares it"
    harness.now = 8.0
    retry.prepare()

    assert harness.prepared == [8.0]


@pytest.mark.parametrize("stage", ["waiting", "requested", "quiesced"])
def test_a_suspect_that_is_dropped_before_its_retry_does_not_run(harness: RetriesHarness, stage: str) -> None:
    if stage == "requested":
        harness.retries.quiesce(A, 0.0)
    elif stage == "quiesced":
        harness.quiesce(A)
    harness.take_messages()
    harness.retries.finish(A)

    assert harness.take_messages() == ([] if stage == "waiting" else [Resume(A)]), "the loop resumes"
    assert not harness.retries.begin(A, harness.prepared.append)
    assert not harness.retries.quiesce(A, 0.0)
    assert harness.take_messages() == []
    assert harness.retries.next_suspect() == task(B)


def test_the_end_of_another_task_changes_nothing(harness: RetriesHarness) -> None:
    harness.begin(A)
    harness.retries.finish(C)
    harness.retries.finish(Ownership("a", "another attempt"))

    assert harness.take_messages() == []
    assert harness.phases()["a"] == "alone"


def test_a_retry_begins_once_and_only_after_the_loop_has_quiesced(harness: RetriesHarness) -> None:
    assert not harness.retries.begin(A, harness.prepared.append), "no retry was requested"
    harness.retries.quiesce(A, 0.0)
    harness.take_messages()
    assert not harness.retries.begin(A, harness.prepared.append), "the loop has not quiesced"
    harness.retries.finish(A)
    harness.take_messages()

    harness.begin(B)
    assert not harness.retries.begin(B, harness.prepared.append)
    assert harness.take_messages() == []


def test_a_retry_that_could_not_be_recorded_stays_quiesced(harness: RetriesHarness) -> None:
    harness.quiesce(A)
    assert harness.retries.quiesce(A, 0.0)
    assert not harness.retries.quiesce(B, 0.0), "another suspect's retry"
    assert harness.phases() == {"a": "alone", "b": "untouched", "c": "untouched"}
    assert harness.retries.begin(A, harness.prepared.append)


@pytest.mark.parametrize("stage", ["waiting", "requested", "quiesced", "running"])
def test_the_loop_resumes_when_no_more_retries_come(harness: RetriesHarness, stage: str) -> None:
    if stage == "requested":
        harness.retries.quiesce(A, 0.0)
    elif stage == "quiesced":
        harness.quiesce(A)
    elif stage == "running":
        harness.begin(A)
    harness.take_messages()
    harness.retries.close()

    assert harness.take_messages() == ([Resume(A)] if stage in ("requested", "quiesced") else []), (
        "a running retry continues"
    )
    assert not harness.retries.quiesce(B, 0.0)
    assert harness.take_messages() == []
    assert harness.retries.num_waiting == (1 if stage == "running" else 2)
    if stage != "running":
        # Also after it was recorded: the turn that was to begin it may have failed.
        assert not harness.retries.begin(A, harness.prepared.append)


# The intake, against a real server.


class IntakeWithSuspects(IntakeHarness):
    """An intake that finds two suspects and a new task. The test takes the place of the loop."""

    def __init__(self, client: "redis.Redis") -> None:
        self.suspects = [submit(client) for _ in range(2)]
        die_with_all(client)
        self.other = submit(client)
        super().__init__(client)

    def look(self) -> list[Message]:
        self.intake.turn()
        return self.inbox.take(0.0)

    def phase(self, task_id: str) -> str:
        value: Any = self.client.hget(keys.run(task_id), "standing")
        return str(value.decode())


@pytest.fixture
def intake(redis_client: "redis.Redis", monkeypatch: pytest.MonkeyPatch) -> IntakeWithSuspects:
    monkeypatch.setattr("worker.intake.POLL_SECONDS", 0.0)
    return IntakeWithSuspects(redis_client)


def test_other_tasks_are_prepared_while_suspects_wait(intake: IntakeWithSuspects) -> None:
    prepared, quiesce = intake.look()

    assert isinstance(prepared, PreparedTask)
    assert prepared.ownership.task_id == intake.other
    assert isinstance(quiesce, Quiesce)
    assert quiesce.ownership.task_id == intake.suspects[0]
    assert intake.phase(intake.suspects[0]) == "untouched", "nothing is recorded yet"


def test_a_retry_is_recorded_before_it_begins(intake: IntakeWithSuspects) -> None:
    *_, quiesce = intake.look()
    assert isinstance(quiesce, Quiesce)
    quiesce.heard.set()
    (retry,) = intake.look()

    assert isinstance(retry, RetryIsolated)
    assert retry.ownership.task_id == intake.suspects[0]
    phases = [intake.phase(one) for one in (*intake.suspects, intake.other)]
    assert phases == ["alone", "untouched", "untouched"]
    prepared = retry.prepare()
    assert prepared is not None
    assert prepared.ownership == retry.ownership


def test_nothing_is_claimed_during_a_retry(intake: IntakeWithSuspects) -> None:
    *_, quiesce = intake.look()
    late = submit(intake.client)
    assert intake.look() == [], "the loop has not quiesced"
    assert isinstance(quiesce, Quiesce)
    quiesce.heard.set()
    intake.look()
    assert intake.look() == [], "it runs"
    assert not intake.client.hexists(keys.run(late), "owner")

    intake.context.isolation.finish(quiesce.ownership)
    resume, prepared, again = intake.look()
    assert resume == Resume(quiesce.ownership)
    assert isinstance(prepared, PreparedTask), "other tasks are claimed between two retries"
    assert isinstance(again, Quiesce)
    assert again.ownership.task_id == intake.suspects[1]


def test_without_redis_no_retry_begins(intake: IntakeWithSuspects, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, quiesce = intake.look()
    assert isinstance(quiesce, Quiesce)
    quiesce.heard.set()

    def fail(*_: object) -> None:
        raise redis.ConnectionError("away")

    with monkeypatch.context() as patched:
        patched.setattr(intake.store, "renew", fail)
        for _ in range(3):
            with pytest.raises(redis.ConnectionError):
                intake.intake.turn()
        assert intake.inbox.take(0.0) == []
    (retry,) = intake.look()
    assert isinstance(retry, RetryIsolated)


@pytest.mark.parametrize("how", ["lost", "cancelled"])
def test_a_suspect_that_is_gone_does_not_run(intake: IntakeWithSuspects, how: str) -> None:
    *_, quiesce = intake.look()
    assert isinstance(quiesce, Quiesce)
    quiesce.heard.set()
    if how == "lost":
        intake.client.hset(keys.run(quiesce.ownership.task_id), "owner", "another")
    else:
        TaskStore(intake.client).cancel(quiesce.ownership.task_id)

    assert intake.look() == [Resume(quiesce.ownership)]


def test_a_suspect_that_cannot_be_prepared_ends_its_retry(redis_client: "redis.Redis") -> None:
    bad = submit(redis_client, prompt_token_ids=(1,), sampling={"max_tokens": 3, "temperature": -1})
    die_with_all(redis_client)
    harness = IntakeHarness(redis_client)
    harness.intake.turn()
    (quiesce,) = harness.inbox.take(0.0)
    assert isinstance(quiesce, Quiesce)
    quiesce.heard.set()
    harness.intake.turn()
    (retry,) = harness.inbox.take(0.0)
    assert isinstance(retry, RetryIsolated)

    assert retry.prepare() is None
    harness.publisher.turn()
    assert harness.inbox.take(0.0) == [Resume(quiesce.ownership)]
    assert ended(redis_client, bad)
