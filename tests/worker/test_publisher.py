"""The publisher against a real server: every message is stored once, whichever calls or replies are lost."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import redis

from engine.engine import RequestPosition
from engine.outputs import SequenceOutput, StepOutput, StepReport, WaitingReason
from engine.sequence import FinishReason
from tests.worker.fakes import SLUG, RecordingContext, ended, log_length, submit, tokens_of
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


class PublisherHarness:
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
def harness(redis_client: "redis.Redis") -> PublisherHarness:
    return PublisherHarness(redis_client)


def test_waiting_outputs_are_stored_in_one_call(harness: PublisherHarness) -> None:
    for token in range(1, 6):
        harness.say(token)
    harness.turn()

    assert len(harness.unreliable.calls) == 1
    assert log_length(harness.client, harness.task) == 5
    assert harness.publisher.is_drained


@pytest.mark.parametrize("seed", range(20))
def test_every_message_is_stored_once_whatever_is_lost(harness: PublisherHarness, seed: int) -> None:
    """Lost calls and lost replies in any order: every `seq` once, in order, and one end."""
    chance = random.Random(seed)
    for token in range(1, 31):
        harness.say(token)
        harness.unreliable.lose_call = chance.random() < 0.3
        harness.unreliable.lose_reply = chance.random() < 0.3
        harness.turn()
    harness.say(31, held_text="!", finish_reason=FinishReason.STOP)
    harness.unreliable.lose_call, harness.unreliable.lose_reply = False, True
    harness.turn()
    harness.unreliable.lose_reply = False
    harness.turn()

    events = ended(harness.client, harness.task)
    assert tokens_of(events) == list(range(1, 32))
    assert "".join(event.text for event in events) == "".join(f"<{n}>" for n in range(1, 32)) + "!"
    assert len(harness.owned_tasks) == 0
    assert harness.context.lost == []
    assert (harness.publisher.num_completed, harness.publisher.is_drained) == (1, True)


def test_a_log_that_lost_entries_is_filled_again(harness: PublisherHarness) -> None:
    """A crash of the host may lose the last second of the log. The owner still has it."""
    for token in (1, 2, 3):
        harness.say(token)
    harness.turn()
    harness.client.delete(keys.log(harness.task))
    harness.say(4, finish_reason=FinishReason.LENGTH)
    harness.turn()
    assert not harness.publisher.is_drained, "the gap is known"
    assert harness.num_published == 3, "rejected messages do not count"
    harness.turn()

    assert harness.num_published == 8
    assert tokens_of(ended(harness.client, harness.task)) == [1, 2, 3, 4]


def test_nothing_is_written_to_a_lost_task(harness: PublisherHarness) -> None:
    harness.say(1)
    harness.turn()
    harness.client.hset(keys.run(harness.task), "owner", "another")
    harness.say(2)
    harness.turn()
    harness.say(3)
    harness.turn()

    assert harness.context.lost == [harness.ownership]
    assert log_length(harness.client, harness.task) == 1
    assert harness.queue.backlog == 0


def test_a_cancelled_task_differs_from_a_lost_one(harness: PublisherHarness) -> None:
    harness.say(1)
    harness.turn()
    TaskStore(harness.client).cancel(harness.task)
    harness.say(2)
    harness.turn()

    assert (harness.context.lost, harness.context.cancelled) == ([], [harness.ownership])
    assert (harness.queue.backlog, harness.num_published) == (0, 1)


def test_a_stream_of_a_dropped_task_is_not_opened(harness: PublisherHarness) -> None:
    """A resumed task that is cancelled while it is prepared is forgotten before its stream is opened.

    The stream has nothing to store, so no rejected write would ever remove it.
    """
    other = Ownership(harness.task, "an earlier one")
    harness.queue.forget(other.request_id)
    harness.queue.open(Stream(other, entries=[LogEntry.of_token(1, "a")]))
    harness.publisher.turn()

    assert harness.publisher.request_ids == {harness.ownership.request_id}


def test_the_engines_end_of_a_cancelled_request_is_not_written(harness: PublisherHarness) -> None:
    """The cancel wrote the end. A second end would be one too many."""
    harness.say(None, finish_reason=FinishReason.CANCELLED)
    harness.turn()
    assert log_length(harness.client, harness.task) == 0

    TaskStore(harness.client).cancel(harness.task)
    assert len(ended(harness.client, harness.task)) == 1
    assert harness.publisher.is_drained


def test_a_full_queue_has_room_again_once_it_is_stored(redis_client: "redis.Redis") -> None:
    harness = PublisherHarness(redis_client, max_backlog=4)
    harness.unreliable.lose_call = True
    for token in range(1, 5):
        assert not harness.queue.is_full
        harness.say(token)
        harness.turn()
    assert harness.queue.is_full

    harness.unreliable.lose_call = False
    harness.turn()

    assert not harness.queue.is_full
    assert log_length(redis_client, harness.task) == 4


def test_a_request_fails_once(harness: PublisherHarness) -> None:
    harness.queue.fail(harness.ownership.request_id, invalid_value("prompt", "prompt: too long"))
    harness.queue.fail(harness.ownership.request_id, invalid_value("prompt", "again"))
    harness.say(1)
    harness.turn()

    (end,) = ended(harness.client, harness.task)
    assert isinstance(end, FinishedEvent)
    assert end.error == invalid_value("prompt", "prompt: too long").to_json()
    assert end.usage == {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3, "cached_tokens": 0}


def position(harness: PublisherHarness) -> tuple[int | None, int | None, str | None]:
    return harness.snapshot.position, harness.snapshot.tokens_ahead, harness.snapshot.waiting_for


def test_a_position_is_written_and_removed_at_the_start(harness: PublisherHarness) -> None:
    for _ in range(2):
        harness.wait(requests_ahead=2)
        harness.turn()
    assert position(harness) == (2, 70, "kv_blocks")
    assert len(harness.unreliable.calls) == 1, "the same position is not written again"

    harness.start()
    harness.turn()
    assert harness.snapshot.status == "in_progress"
    assert position(harness) == (None, None, None)


def test_the_position_of_a_preempted_request_is_removed_when_it_resumes(harness: PublisherHarness) -> None:
    harness.start()
    harness.turn()
    harness.wait()
    harness.turn()
    assert harness.snapshot.status == "in_progress"
    assert position(harness) == (0, 70, "kv_blocks")
    harness.queue.put_positions([])
    harness.turn()
    assert position(harness) == (None, None, None)
    num_calls = len(harness.unreliable.calls)
    harness.queue.put_positions([])
    harness.turn()
    assert len(harness.unreliable.calls) == num_calls


@pytest.mark.parametrize("lost", ["nothing", "call", "reply"])
def test_a_start_removes_a_position_that_may_not_be_stored_yet(harness: PublisherHarness, lost: str) -> None:
    """A slow Redis: one write carries the position and the start, whatever became of an earlier write."""
    harness.wait()
    if lost != "nothing":
        setattr(harness.unreliable, f"lose_{lost}", True)
        harness.turn()
        setattr(harness.unreliable, f"lose_{lost}", False)
    harness.start()
    harness.turn()
    assert position(harness) == (None, None, None)


def test_an_end_in_the_log_is_settled_again(redis_client: "redis.Redis") -> None:
    """The log has all tokens and the end: nothing runs, and the task ends as the log says."""
    harness = PublisherHarness(redis_client)
    ending = Stream(harness.ownership, num_prompt_tokens=3)
    ending.add(
        SequenceOutput(request_id="", token_id=5, text="<5>", held_text="", finish_reason=FinishReason.STOP)
    )
    entries = ending.to_write().entries
    owner = harness.ownership.owner
    TaskStore(redis_client).publish([Write(task_id=harness.task, owner=owner, entries=entries)])

    harness.queue.open(Stream(harness.ownership, entries=entries))
    harness.turn()

    snapshot = TaskStore(redis_client).inspect(harness.task)
    assert snapshot is not None
    assert snapshot.status == "completed"
    assert len(ended(redis_client, harness.task)) == 2


def test_a_retry_ends_when_a_token_or_an_end_is_stored(harness: PublisherHarness) -> None:
    """Facts do not count, and neither does a write that may be lost."""
    harness.start()
    harness.publisher.turn()
    assert harness.retries.finished == []
    harness.say(7)
    harness.unreliable.lose_call = True
    with pytest.raises(redis.ConnectionError):
        harness.publisher.turn()
    assert harness.retries.finished == []
    harness.unreliable.lose_call = False
    harness.publisher.turn()
    assert harness.retries.finished == [harness.ownership]
    harness.say(None, finish_reason=FinishReason.LENGTH)
    harness.publisher.turn()

    assert harness.retries.finished == [harness.ownership] * 2


def test_a_request_that_waits_for_its_grammar_is_not_idle(harness: PublisherHarness) -> None:
    """The grammar is being compiled, which may end the process."""
    for reason, idle_ids in (
        (WaitingReason.GRAMMAR, set()),
        (WaitingReason.KV_BLOCKS, {harness.ownership.request_id}),
    ):
        harness.wait(reason=reason)
        harness.publisher.turn()
        assert harness.queue.idle_ids == idle_ids
