"""Stores what the engine says: all that gathered since the last call, in one script call.

Law: nothing is lost and nothing doubled, whatever happens to a call or its reply: what is not known to be
stored is sent again under the same `seq`. Knows no engine but its outputs.
"""

import queue
import threading
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass

from engine.engine import QueuePosition
from engine.outputs import SequenceOutput, StepOutput, WaitingReason
from engine.sequence import FinishReason
from monitoring.worker import WorkerMetrics
from tokenmill.protocol.messages import TaskError
from tokenmill.protocol.records import Accepted, Cancelled, Gap, Lost, Outcome, Write
from tokenmill.protocol.store.task_store import TaskStore
from worker.ownership import OwnedTasks, Ownership
from worker.stream import Stream

IDLE_SECONDS = 0.25
MAX_BACKLOG = 4096
"""Tokens that may wait for Redis before the loop stops stepping: at 64 sequences a minute of slow steps."""


@dataclass(frozen=True, slots=True)
class _Opened:
    stream: Stream


@dataclass(frozen=True, slots=True)
class _Stepped:
    output: StepOutput


@dataclass(frozen=True, slots=True)
class _Line:
    line: list[QueuePosition]


@dataclass(frozen=True, slots=True)
class _Failed:
    request_id: str
    error: TaskError


@dataclass(frozen=True, slots=True)
class _Forgotten:
    request_id: str


_Item = _Opened | _Stepped | _Line | _Failed | _Forgotten


class Publisher:
    """`turn` belongs to one thread; the other methods may be called from any and return at once.

    `on_lost` gets tasks that another took, `on_cancelled` those that a cancel ended: both as a refused write
    tells it. `on_progress` gets each task of which something new is stored: tokens, ends, or its settlement.
    """

    def __init__(
        self,
        store: TaskStore,
        owned_tasks: OwnedTasks,
        metrics: WorkerMetrics,
        *,
        on_lost: Callable[[Ownership], None],
        on_cancelled: Callable[[Ownership], None],
        on_progress: Callable[[Ownership], None],
        max_backlog: int = MAX_BACKLOG,
    ) -> None:
        self.num_completed = 0
        self.num_failed = 0
        self._store = store
        self._owned_tasks = owned_tasks
        self._metrics = metrics
        self._on_lost = on_lost
        self._on_cancelled = on_cancelled
        self._on_progress = on_progress
        self._max_backlog = max_backlog
        self._items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._streams: dict[str, Stream] = {}
        self._in_line: set[str] = set()
        # Replaced, and never changed: other threads read it.
        self.idle_ids: Set[str] = frozenset()
        """Requests that wait in the scheduler, as it was last told, and of which nothing is being done."""
        self._room = threading.Event()
        # Each counter has one writing thread: the loop's, and the publisher's two.
        self._num_handed = 0
        self._num_gathered = 0
        self._num_unstored = 0

    # What other threads say.

    @property
    def backlog(self) -> int:
        """Outputs that Redis is not known to have."""
        return self._num_handed - self._num_gathered + self._num_unstored

    @property
    def is_full(self) -> bool:
        return self.backlog >= self._max_backlog

    def wait_for_room(self, seconds: float) -> None:
        self._room.clear()
        if self.is_full:
            self._room.wait(seconds)

    def open(self, stream: Stream) -> None:
        """From here on outputs of this request are stored in `stream`."""
        self._items.put(_Opened(stream))

    def hand(self, output: StepOutput) -> None:
        self._num_handed += len(output.outputs)
        self._items.put(_Stepped(output))

    def tell_waiting(self, line: list[QueuePosition]) -> None:
        """All that wait in the scheduler; who was in the line before and is not now waits no longer."""
        self._items.put(_Line(line))

    def fail(self, request_id: str, error: TaskError) -> None:
        self._items.put(_Failed(request_id, error))

    def forget(self, request_id: str) -> None:
        """It is not ours any more: what comes of it is not stored."""
        self._items.put(_Forgotten(request_id))

    # The publisher's thread.

    def turn(self) -> None:
        """Store what there is, waiting a moment for it. Raises `RedisError`; nothing is lost by that."""
        self._gather(0.0 if self._num_unstored else IDLE_SECONDS)
        self._store_news()

    @property
    def is_drained(self) -> bool:
        """All that was said is stored."""
        return self._items.empty() and not any(stream.has_news for stream in self._streams.values())

    def _gather(self, wait_seconds: float) -> None:
        try:
            if wait_seconds:
                self._take(self._items.get(timeout=wait_seconds))
            while True:
                self._take(self._items.get_nowait())
        except queue.Empty:
            self._count()

    def _take(self, item: _Item) -> None:
        match item:
            case _Opened(stream):
                self._open(stream)
            case _Stepped(output):
                self._take_step(output)
            case _Line(line):
                self._take_line(line)
            case _Failed(request_id, error):
                if (failed := self._streams.get(request_id)) and not failed.has_ended:
                    failed.fail(error)
            case _Forgotten(request_id):
                self._streams.pop(request_id, None)

    def _open(self, stream: Stream) -> None:
        # One that was lost or cancelled while it was prepared has been forgotten before this.
        if stream.ownership in self._owned_tasks:
            self._streams[stream.ownership.request_id] = stream

    def _take_line(self, line: list[QueuePosition]) -> None:
        num_outputs = Counter(waiting.request_id for waiting in line)
        heads = {waiting.request_id: waiting for waiting in reversed(line)}
        places = {request_id: place for place, request_id in enumerate(num_outputs)}
        # A task of which some output runs does not wait.
        waiting_ids = {name for name in heads if self._num_open(name) <= num_outputs[name]}
        for request_id in waiting_ids:
            self._note(request_id, _facts_of(heads[request_id], places[request_id]))
        # A preempted request that runs again does not start again, so its start tells nothing.
        for request_id in self._in_line - waiting_ids:
            self._note(request_id, _NOT_WAITING)
        self._in_line = waiting_ids
        # A grammar is compiled while its request waits.
        self.idle_ids = {one for one in waiting_ids if heads[one].reason is not WaitingReason.GRAMMAR}

    def _num_open(self, request_id: str) -> int:
        stream = self._streams.get(request_id)
        return stream.num_open if stream else 0

    def _take_step(self, output: StepOutput) -> None:
        for request_id in output.started:
            # When the step was decided, not when it came out: the first token is of the same step.
            seconds = output.report.seconds_since_decision
            self._note(request_id, {"scheduled": f"{seconds:.6f}", **_NOT_WAITING})
        faults = [fault for each in output.outputs if (fault := self._attempt(each.request_id, each))]
        self._num_gathered += len(output.outputs)
        if faults:
            raise faults[0]

    def _attempt(self, request_id: str, output: SequenceOutput) -> BaseException | None:
        """Returns what failed. Nothing more of that stream is stored: its next message would be a gap."""
        try:
            self._take_output(output)
        except BaseException as fault:  # noqa: BLE001 - raised once the others have their outputs
            self._streams.pop(request_id, None)
            return fault
        return None

    def _take_output(self, output: SequenceOutput) -> None:
        if output.finish_reason is FinishReason.CANCELLED:
            # Who cancelled has told the readers already, in one script with all that belongs to it.
            self._streams.pop(output.request_id, None)
        elif (stream := self._streams.get(output.request_id)) and not stream.has_ended:
            stream.add(output)

    def _note(self, request_id: str, facts: dict[str, str]) -> None:
        if stream := self._streams.get(request_id):
            stream.note(facts)

    def _store_news(self) -> None:
        streams = [stream for stream in self._streams.values() if stream.has_news]
        if not streams:
            return
        writes = [self._to_write(stream) for stream in streams]
        outcomes = self._store.publish(writes)
        # Counted once for all: this runs beside each step, and takes the interpreter from it.
        followed = zip(streams, writes, outcomes, strict=True)
        self._metrics.published(sum(self._follow(*each) for each in followed))
        self._count()
        self._room.set()

    def _to_write(self, stream: Stream) -> Write:
        try:
            return stream.to_write()
        except BaseException:
            # This turn fails, and the next stores what the others have.
            del self._streams[stream.ownership.request_id]
            raise

    def _follow(self, stream: Stream, write: Write, outcome: Outcome) -> int:
        """Gives how many messages were stored."""
        match outcome:
            case Accepted():
                stream.stored(write)
                if write.entries or write.settlement:
                    self._on_progress(stream.ownership)
                if write.settlement:
                    self._close(stream, completed=write.settlement.status == "completed")
                return len(write.entries)
            case Gap(length):
                stream.rewind(length)
            case Lost():
                del self._streams[stream.ownership.request_id]
                self._on_lost(stream.ownership)
            case Cancelled():
                del self._streams[stream.ownership.request_id]
                self._on_cancelled(stream.ownership)
        return 0

    def _close(self, stream: Stream, *, completed: bool) -> None:
        del self._streams[stream.ownership.request_id]
        self._owned_tasks.drop(stream.ownership)
        self.num_completed += completed
        self.num_failed += not completed

    def _count(self) -> None:
        self._num_unstored = sum(stream.num_unstored for stream in self._streams.values())
        self._metrics.publish_backlog(self.backlog)


_NOT_WAITING = {"waiting_for": "", "position": "", "tokens_ahead": ""}


def _facts_of(waiting: QueuePosition, place: int) -> dict[str, str]:
    return {
        "waiting_for": waiting.reason.value,
        # How many tasks stand before it, as by the rank in Redis.
        "position": str(place),
        "tokens_ahead": str(waiting.tokens_ahead),
    }
