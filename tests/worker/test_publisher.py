"""The publisher against a real server: every message is stored once, whichever calls or replies are lost."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import redis

from engine.engine import RequestPosition
from engine.outputs import SequenceOutput, StepOutput, StepReport, WaitingReason
from engine.sequence import FinishReason
from tests.worker.workshop import SLUG, RecordingContext, ended, log_length, submit, tokens_of
from tokenmill.protocol import keys
from tokenmill.protocol.messages import FinishedEvent, LogEntry
from tokenmill.protocol.records import Outcome, Write
from tokenmill.protocol.snapshots import TaskSnapshot
from tokenmill.protocol.store.task_store import TaskStore
from worker.context import WorkerContext
from worker.errors import invalid_value
from worker.isolation import IsolatedRetries
from worker.output_queue import OutputQueue
from worker.ownership import Ownership
from worker.publisher import Publisher
from worker.stream import Stream


class Unreliable:
    """A store whose `publish` fails before the call arrives or before its reply does."""

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


class RecordingRetries(IsolatedRetries):
    """Records every task of which something was stored or that was dropped."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context.inbox, context.wake, context.clock)
        self.finished: list[Ownership] = []

    def finish(self, ownership: Ownership) -> None:
        self.finished.append(ownership)
        super().finish(ownership)


class Desk:
    """A publisher with one claimed task."""

    def __init__(self, client: "redis.Redis", max_backlog: int = 100, num_outputs: int = 1) -> None:
        self.client = client
        self.task = submit(client, sampling={"n": num_outputs})
        store = TaskStore(client)
        self.queue = OutputQueue(max_backlog)
        self.context = RecordingContext(outputs=self.queue)
        self.retries = self.context.isolation = RecordingRetries(self.context)
        self.owned_tasks = self.context.owned_tasks
        self.unreliable = Unreliable(store)
        unreliable: Any = self.unreliable
        self.publisher = Publisher(unreliable, self.context)
        (claimed,) = store.claim(SLUG, worker="w", max_tasks=1, lease_seconds=60)
        self.ownership = Ownership(claimed.task_id, claimed.owner)
        self.owned_tasks.add(self.ownership)
        self.queue.open(Stream(self.ownership, num_prompt_tokens=3, num_outputs=num_outputs))

    def say(self, token: int | None, **fields: Any) -> None:
        output = SequenceOutput(
            request_id=self.ownership.request_id, token_id=token, text=f"<{token}>" if token else "", **fields
        )
        self.queue.put(StepOutput(outputs=(output,), started=(), report=StepReport(step=1)))

    def start(self) -> None:
        """The engine reports that it started the request."""
        started = (self.ownership.request_id,)
        self.queue.put(StepOutput(outputs=(), started=started, report=StepReport(step=1)))

    def wait(self, requests_ahead: int = 0, reason: WaitingReason = WaitingReason.KV_BLOCKS) -> None:
        """The engine reports that the request waits."""
        self.queue.put_positions(
            [
                RequestPosition(
                    request_id=self.ownership.request_id,
                    requests_ahead=requests_ahead,
                    tokens_ahead=70,
                    reason=reason,
                )
            ]
        )

    @property
    def num_published(self) -> float:
        return self.context.exported.value("messages_published_total")

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


def test_waiting_outputs_are_stored_in_one_call(desk: Desk) -> None:
    for token in range(1, 6):
        desk.say(token)
    desk.turn()

    assert len(desk.unreliable.calls) == 1
    assert log_length(desk.client, desk.task) == 5
    assert desk.publisher.is_drained


@pytest.mark.parametrize("seed", range(20))
def test_every_message_is_stored_once_whatever_is_lost(desk: Desk, seed: int) -> None:
    """Lost calls and lost replies in any order: every `seq` once, in order, and one end."""
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
    assert desk.context.lost == []
    assert (desk.publisher.num_completed, desk.publisher.is_drained) == (1, True)


def test_a_log_that_lost_entries_is_filled_again(desk: Desk) -> None:
    """A crash of the host may lose the last second of the log. The owner still has it."""
    for token in (1, 2, 3):
        desk.say(token)
    desk.turn()
    desk.client.delete(keys.log(desk.task))
    desk.say(4, finish_reason=FinishReason.LENGTH)
    desk.turn()
    assert not desk.publisher.is_drained, "the gap is known"
    assert desk.num_published == 3, "rejected messages do not count"
    desk.turn()

    assert desk.num_published == 8
    assert tokens_of(ended(desk.client, desk.task)) == [1, 2, 3, 4]


def test_nothing_is_written_to_a_lost_task(desk: Desk) -> None:
    desk.say(1)
    desk.turn()
    desk.client.hset(keys.run(desk.task), "owner", "another")
    desk.say(2)
    desk.turn()
    desk.say(3)
    desk.turn()

    assert desk.context.lost == [desk.ownership]
    assert log_length(desk.client, desk.task) == 1
    assert desk.queue.backlog == 0


def test_a_cancelled_task_differs_from_a_lost_one(desk: Desk) -> None:
    desk.say(1)
    desk.turn()
    TaskStore(desk.client).cancel(desk.task)
    desk.say(2)
    desk.turn()

    assert (desk.context.lost, desk.context.cancelled) == ([], [desk.ownership])
    assert (desk.queue.backlog, desk.num_published) == (0, 1)


def test_a_stream_of_a_dropped_task_is_not_opened(desk: Desk) -> None:
    """A resumed task that is cancelled while it is prepared is forgotten before its stream is opened.

    The stream has nothing to store, so no rejected write would ever remove it.
    """
    other = Ownership(desk.task, "an earlier one")
    desk.queue.forget(other.request_id)
    desk.queue.open(Stream(other, entries=[LogEntry.of_token(1, "a")]))
    desk.publisher.turn()

    assert desk.publisher.request_ids == {desk.ownership.request_id}


def test_the_engines_end_of_a_cancelled_request_is_not_written(desk: Desk) -> None:
    """The cancel wrote the end. A second end would be one too many."""
    desk.say(None, finish_reason=FinishReason.CANCELLED)
    desk.turn()
    assert log_length(desk.client, desk.task) == 0

    TaskStore(desk.client).cancel(desk.task)
    assert len(ended(desk.client, desk.task)) == 1
    assert desk.publisher.is_drained


def test_a_full_queue_has_room_again_once_it_is_stored(redis_client: "redis.Redis") -> None:
    desk = Desk(redis_client, max_backlog=4)
    desk.unreliable.lose_call = True
    for token in range(1, 5):
        assert not desk.queue.is_full
        desk.say(token)
        desk.turn()
    assert desk.queue.is_full

    desk.unreliable.lose_call = False
    desk.turn()

    assert not desk.queue.is_full
    assert log_length(redis_client, desk.task) == 4


def test_a_request_fails_once(desk: Desk) -> None:
    desk.queue.fail(desk.ownership.request_id, invalid_value("prompt", "prompt: too long"))
    desk.queue.fail(desk.ownership.request_id, invalid_value("prompt", "again"))
    desk.say(1)
    desk.turn()

    (end,) = ended(desk.client, desk.task)
    assert isinstance(end, FinishedEvent)
    assert end.error == invalid_value("prompt", "prompt: too long").to_json()
    assert end.usage == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3, "cached_tokens": 0}


def position(desk: Desk) -> tuple[int | None, int | None, str | None]:
    return desk.snapshot.position, desk.snapshot.tokens_ahead, desk.snapshot.waiting_for


def test_a_position_is_written_and_removed_at_the_start(desk: Desk) -> None:
    for _ in range(2):
        desk.wait(requests_ahead=2)
        desk.turn()
    assert position(desk) == (2, 70, "kv_blocks")
    assert len(desk.unreliable.calls) == 1, "the same position is not written again"

    desk.start()
    desk.turn()
    assert desk.snapshot.status == "in_progress"
    assert position(desk) == (None, None, None)


def test_the_position_of_a_preempted_request_is_removed_when_it_resumes(desk: Desk) -> None:
    desk.start()
    desk.turn()
    desk.wait()
    desk.turn()
    assert desk.snapshot.status == "in_progress"
    assert position(desk) == (0, 70, "kv_blocks")
    desk.queue.put_positions([])
    desk.turn()
    assert position(desk) == (None, None, None)
    num_calls = len(desk.unreliable.calls)
    desk.queue.put_positions([])
    desk.turn()
    assert len(desk.unreliable.calls) == num_calls


@pytest.mark.parametrize("lost", ["nothing", "call", "reply"])
def test_a_start_removes_a_position_that_may_not_be_stored_yet(desk: Desk, lost: str) -> None:
    """A slow Redis: one write carries the position and the start, whatever became of an earlier write."""
    desk.wait()
    if lost != "nothing":
        setattr(desk.unreliable, f"lose_{lost}", True)
        desk.turn()
        setattr(desk.unreliable, f"lose_{lost}", False)
    desk.start()
    desk.turn()
    assert position(desk) == (None, None, None)


def test_an_end_in_the_log_is_settled_again(redis_client: "redis.Redis") -> None:
    """The log has all tokens and the end: nothing runs, and the task ends as the log says."""
    desk = Desk(redis_client)
    ending = Stream(desk.ownership, num_prompt_tokens=3)
    ending.add(
        SequenceOutput(request_id="", token_id=5, text="<5>", held_text="", finish_reason=FinishReason.STOP)
    )
    entries = ending.to_write().entries
    owner = desk.ownership.owner
    TaskStore(redis_client).publish([Write(task_id=desk.task, owner=owner, entries=entries)])

    desk.queue.open(Stream(desk.ownership, entries=entries))
    desk.turn()

    snapshot = TaskStore(redis_client).inspect(desk.task)
    assert snapshot is not None
    assert snapshot.status == "completed"
    assert len(ended(redis_client, desk.task)) == 2


def test_a_retry_ends_when_a_token_or_an_end_is_stored(desk: Desk) -> None:
    """Facts do not count, and neither does a write that may be lost."""
    desk.start()
    desk.publisher.turn()
    assert desk.retries.finished == []
    desk.say(7)
    desk.unreliable.lose_call = True
    with pytest.raises(redis.ConnectionError):
        desk.publisher.turn()
    assert desk.retries.finished == []
    desk.unreliable.lose_call = False
    desk.publisher.turn()
    assert desk.retries.finished == [desk.ownership]
    desk.say(None, finish_reason=FinishReason.LENGTH)
    desk.publisher.turn()

    assert desk.retries.finished == [desk.ownership] * 2


def test_a_request_that_waits_for_its_grammar_is_not_idle(desk: Desk) -> None:
    """The grammar is being compiled, which may end the process."""
    for reason, idle_ids in (
        (WaitingReason.GRAMMAR, set()),
        (WaitingReason.KV_BLOCKS, {desk.ownership.request_id}),
    ):
        desk.wait(reason=reason)
        desk.publisher.turn()
        assert desk.queue.idle_ids == idle_ids
