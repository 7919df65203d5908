"""The publisher against a real server: whatever happens to calls and replies, each message is there once."""

import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import redis

from engine.engine import QueuePosition
from engine.outputs import SequenceOutput, StepOutput, StepReport, WaitingReason
from engine.sequence import FinishReason
from tests.worker.workshop import SLUG, ended, log_length, new_metrics, submit, tokens_of
from tokenmill.protocol import keys
from tokenmill.protocol.messages import FinishedEvent, LogEntry
from tokenmill.protocol.records import Outcome, Write
from tokenmill.protocol.snapshots import TaskSnapshot
from tokenmill.protocol.store.task_store import TaskStore
from worker.errors import invalid_value
from worker.ownership import OwnedTasks, Ownership
from worker.publisher import Publisher
from worker.stream import Stream


class Unreliable:
    """A store whose `publish` fails as it is told, before the call arrives or before its reply does."""

    def __init__(self, store: TaskStore) -> None:
        self._store = store
        self.lose_call = self.lose_reply = False
        self.calls: list[Sequence[Write]] = []

    def publish(self, writes: Sequence[Write]) -> list[Outcome]:
        if self.lose_call:
            raise redis.ConnectionError("lost call")
        outcomes = self._store.publish(writes)
        self.calls.append(writes)
        if self.lose_reply:
            raise redis.TimeoutError("lost reply")
        return outcomes


class Desk:
    """A publisher with one claimed task."""

    def __init__(self, client: "redis.Redis", max_backlog: int = 100, num_outputs: int = 1) -> None:
        self.client = client
        self.task = submit(client, sampling={"n": num_outputs})
        store = TaskStore(client)
        self.owned_tasks = OwnedTasks(threading.Event())
        self.lost: list[Ownership] = []
        self.cancelled: list[Ownership] = []
        self.progressed: list[Ownership] = []
        self.metrics = new_metrics()
        self.unreliable = Unreliable(store)
        unreliable: Any = self.unreliable
        self.publisher = Publisher(
            unreliable,
            self.owned_tasks,
            self.metrics,
            on_lost=self.lost.append,
            on_cancelled=self.cancelled.append,
            on_progress=self.progressed.append,
            max_backlog=max_backlog,
        )
        (claimed,) = store.claim(SLUG, worker="w", max_tasks=1, lease_seconds=60)
        self.ownership = Ownership(claimed.task_id, claimed.owner)
        self.owned_tasks.take(self.ownership)
        self.publisher.open(Stream(self.ownership, num_prompt_tokens=3, num_outputs=num_outputs))

    def say(self, token: int | None, **fields: Any) -> None:
        output = SequenceOutput(
            request_id=self.ownership.request_id, token_id=token, text=f"<{token}>" if token else "", **fields
        )
        self.publisher.hand(StepOutput(outputs=(output,), started=(), report=StepReport(step=1)))

    @property
    def num_published(self) -> float:
        value: float = self.metrics._published._value.get()
        return value

    @property
    def snapshot(self) -> TaskSnapshot:
        found = TaskStore(self.client).inspect(self.task)
        assert found is not None
        return found

    def turn(self) -> None:
        try:
            self.publisher.turn()
        except redis.RedisError:
            assert self.unreliable.lose_call or self.unreliable.lose_reply


@pytest.fixture
def desk(redis_client: "redis.Redis") -> Desk:
    return Desk(redis_client)


def test_what_gathered_goes_in_one_call(desk: Desk) -> None:
    for token in range(1, 6):
        desk.say(token)
    desk.turn()

    assert len(desk.unreliable.calls) == 1
    assert log_length(desk.client, desk.task) == 5
    assert desk.publisher.is_drained


@pytest.mark.parametrize("seed", range(20))
def test_exactly_once_whatever_is_lost(desk: Desk, seed: int) -> None:
    """Lost calls and lost replies in any order: each `seq` once, in order, and one end."""
    chance = random.Random(seed)
    for token in range(1, 31):
        desk.say(token)
        desk.unreliable.lose_call = chance.random() < 0.3
        desk.unreliable.lose_reply = chance.random() < 0.3
        desk.turn()
    desk.say(31, held_text="!", finish_reason=FinishReason.STOP)
    desk.unreliable.lose_call, desk.unreliable.lose_reply = False, True
    desk.turn()
    desk.unreliable.lose_reply = False
    desk.turn()

    events = ended(desk.client, desk.task)
    assert tokens_of(events) == list(range(1, 32))
    assert "".join(event.text for event in events) == "".join(f"<{n}>" for n in range(1, 32)) + "!"
    assert len(desk.owned_tasks) == 0
    assert desk.lost == []
    assert (desk.publisher.num_completed, desk.publisher.is_drained) == (1, True)


def test_a_log_that_lost_entries_is_filled_again(desk: Desk) -> None:
    """With the host the last second of the log may be gone; the owner has it still."""
    for token in (1, 2, 3):
        desk.say(token)
    desk.turn()
    desk.client.delete(keys.log(desk.task))
    desk.say(4, finish_reason=FinishReason.LENGTH)
    desk.turn()
    assert not desk.publisher.is_drained, "the gap is known"
    assert desk.num_published == 3, "what was refused is not published"
    desk.turn()

    assert desk.num_published == 8
    assert tokens_of(ended(desk.client, desk.task)) == [1, 2, 3, 4]


def test_a_lost_task_gets_nothing_more(desk: Desk) -> None:
    desk.say(1)
    desk.turn()
    desk.client.hset(keys.run(desk.task), "owner", "another")
    desk.say(2)
    desk.turn()
    desk.say(3)
    desk.turn()

    assert desk.lost == [desk.ownership]
    assert log_length(desk.client, desk.task) == 1
    assert desk.publisher.backlog == 0


def test_a_cancelled_task_is_told_apart_from_a_lost_one(desk: Desk) -> None:
    desk.say(1)
    desk.turn()
    TaskStore(desk.client).cancel(desk.task)
    desk.say(2)
    desk.turn()

    assert (desk.lost, desk.cancelled) == ([], [desk.ownership])
    assert (desk.publisher.backlog, desk.num_published) == (0, 1)


def test_what_is_not_held_any_more_is_not_opened(desk: Desk) -> None:
    """A resumed task that is cancelled while it is prepared is forgotten before it is opened.

    Its stream has nothing to store, so no refused write would ever take it away.
    """
    other = Ownership(desk.task, "an earlier one")
    desk.publisher.forget(other.request_id)
    desk.publisher.open(Stream(other, entries=[LogEntry.of_token(1, "a")]))
    desk.publisher.turn()

    assert desk.publisher._streams.keys() == {desk.ownership.request_id}


def test_the_engines_end_of_a_cancelled_request_is_not_written(desk: Desk) -> None:
    """Who cancelled wrote the end; a second one would be an end too many."""
    desk.say(None, finish_reason=FinishReason.CANCELLED)
    desk.turn()
    assert log_length(desk.client, desk.task) == 0

    TaskStore(desk.client).cancel(desk.task)
    assert len(ended(desk.client, desk.task)) == 1
    assert desk.publisher.is_drained


def test_a_full_buffer_shows_and_empties(redis_client: "redis.Redis") -> None:
    desk = Desk(redis_client, max_backlog=4)
    desk.unreliable.lose_call = True
    for token in range(1, 5):
        assert not desk.publisher.is_full
        desk.say(token)
        desk.turn()
    assert desk.publisher.is_full

    desk.unreliable.lose_call = False
    desk.turn()

    assert not desk.publisher.is_full
    assert log_length(redis_client, desk.task) == 4


def test_a_request_fails_once(desk: Desk) -> None:
    desk.publisher.fail(desk.ownership.request_id, invalid_value("prompt", "prompt: too long"))
    desk.publisher.fail(desk.ownership.request_id, invalid_value("prompt", "again"))
    desk.say(1)
    desk.turn()

    (end,) = ended(desk.client, desk.task)
    assert isinstance(end, FinishedEvent)
    assert end.error == invalid_value("prompt", "prompt: too long").to_json()
    assert end.usage == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3, "cached_tokens": 0}


def test_where_it_waits_is_told_and_taken_back(desk: Desk) -> None:
    line = [
        QueuePosition(request_id=request_id, position=place, tokens_ahead=70, reason=WaitingReason.KV_BLOCKS)
        for place, request_id in enumerate(["x:1", "y:1", "y:1", desk.ownership.request_id], start=1)
    ]
    desk.publisher.tell_waiting(line)
    desk.turn()
    desk.publisher.tell_waiting(line)
    desk.turn()
    waiting = TaskStore(desk.client).inspect(desk.task)
    assert waiting is not None
    assert (waiting.position, waiting.tokens_ahead, waiting.waiting_for) == (2, 70, "kv_blocks")
    assert len(desk.unreliable.calls) == 1, "the same again is not written again"

    desk.publisher.hand(
        StepOutput(outputs=(), started=(desk.ownership.request_id,), report=StepReport(step=1))
    )
    desk.turn()
    started = TaskStore(desk.client).inspect(desk.task)
    assert started is not None
    assert (started.status, started.position, started.waiting_for) == ("in_progress", None, None)


def test_a_preempted_request_that_runs_again_waits_no_longer(desk: Desk) -> None:
    line = QueuePosition(
        request_id=desk.ownership.request_id, position=1, tokens_ahead=70, reason=WaitingReason.KV_BLOCKS
    )
    desk.publisher.hand(
        StepOutput(outputs=(), started=(desk.ownership.request_id,), report=StepReport(step=1))
    )
    desk.turn()
    desk.publisher.tell_waiting([line])
    desk.turn()
    assert (desk.snapshot.status, desk.snapshot.position, desk.snapshot.waiting_for) == (
        "in_progress",
        0,
        "kv_blocks",
    )
    desk.publisher.tell_waiting([])
    desk.turn()
    assert (desk.snapshot.position, desk.snapshot.tokens_ahead, desk.snapshot.waiting_for) == (
        None,
        None,
        None,
    )
    num_calls = len(desk.unreliable.calls)
    desk.publisher.tell_waiting([])
    desk.turn()
    assert len(desk.unreliable.calls) == num_calls


@pytest.mark.parametrize("lost", ["nothing", "call", "reply"])
def test_who_started_since_the_line_was_told_waits_no_longer(desk: Desk, lost: str) -> None:
    """A slow Redis: one write carries the wait and the start, whatever became of an earlier one."""
    line = QueuePosition(
        request_id=desk.ownership.request_id, position=1, tokens_ahead=70, reason=WaitingReason.KV_BLOCKS
    )
    desk.publisher.tell_waiting([line])
    if lost != "nothing":
        setattr(desk.unreliable, f"lose_{lost}", True)
        desk.turn()
        setattr(desk.unreliable, f"lose_{lost}", False)
    desk.publisher.hand(
        StepOutput(outputs=(), started=(desk.ownership.request_id,), report=StepReport(step=1))
    )
    desk.turn()
    assert (desk.snapshot.position, desk.snapshot.tokens_ahead, desk.snapshot.waiting_for) == (
        None,
        None,
        None,
    )


def test_an_end_in_the_log_is_settled_again(redis_client: "redis.Redis") -> None:
    """Its tokens and its end are there: nothing is run, and the task ends as the log says."""
    desk = Desk(redis_client)
    ending = Stream(desk.ownership, num_prompt_tokens=3)
    ending.add(
        SequenceOutput(request_id="", token_id=5, text="<5>", held_text="", finish_reason=FinishReason.STOP)
    )
    entries = ending.to_write().entries
    owner = desk.ownership.owner
    TaskStore(redis_client).publish([Write(task_id=desk.task, owner=owner, entries=entries)])

    desk.publisher.open(Stream(desk.ownership, entries=entries))
    desk.turn()

    snapshot = TaskStore(redis_client).inspect(desk.task)
    assert snapshot is not None
    assert snapshot.status == "completed"
    assert len(ended(redis_client, desk.task)) == 2


def test_a_task_of_which_an_output_runs_does_not_wait(redis_client: "redis.Redis") -> None:
    """Two of its three outputs are preempted, or wait for the first; then all three."""
    desk = Desk(redis_client, num_outputs=3)
    two, three = ([waiting_output(desk, index) for index in range(first, 3)] for first in (1, 0))
    desk.publisher.tell_waiting(two)
    desk.turn()
    assert desk.snapshot.position is None or desk.snapshot.waiting_for == "capacity"
    desk.publisher.tell_waiting(three)
    desk.turn()
    assert (desk.snapshot.position, desk.snapshot.tokens_ahead, desk.snapshot.waiting_for) == (
        0, 10, "kv_blocks",
    )  # fmt: skip
    desk.publisher.tell_waiting(two)
    desk.turn()
    assert desk.snapshot.position is None


def waiting_output(desk: Desk, index: int) -> QueuePosition:
    reason = WaitingReason.KV_BLOCKS if index == 0 else WaitingReason.SIBLING
    return QueuePosition(
        request_id=desk.ownership.request_id,
        index=index,
        position=index + 1,
        tokens_ahead=10 + index,
        reason=reason,
    )


def test_progress_is_what_is_stored_of_tokens_and_ends(desk: Desk) -> None:
    """Told when Redis has it: facts are none, and what may be lost is not either."""
    desk.publisher.hand(
        StepOutput(outputs=(), started=(desk.ownership.request_id,), report=StepReport(step=1))
    )
    desk.publisher.turn()
    assert desk.progressed == []
    desk.say(7)
    desk.unreliable.lose_call = True
    with pytest.raises(redis.ConnectionError):
        desk.publisher.turn()
    assert desk.progressed == []
    desk.unreliable.lose_call = False
    desk.publisher.turn()
    assert desk.progressed == [desk.ownership]
    desk.say(None, finish_reason=FinishReason.LENGTH)
    desk.publisher.turn()

    assert desk.progressed == [desk.ownership] * 2


def test_who_waits_for_a_grammar_is_not_idle(desk: Desk) -> None:
    """It is being compiled, and may end the process."""
    for reason, idle in (
        (WaitingReason.GRAMMAR, set()),
        (WaitingReason.KV_BLOCKS, {desk.ownership.request_id}),
    ):
        one = QueuePosition(request_id=desk.ownership.request_id, position=1, tokens_ahead=0, reason=reason)
        desk.publisher.tell_waiting([one])
        desk.publisher.turn()
        assert desk.publisher.idle_ids == idle
