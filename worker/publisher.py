"""Writes outputs to Redis: everything that arrived since the last call, in one script call.

Invariant: every message is stored exactly once, whichever calls or replies are lost. What is not known to be
stored is sent again under the same `seq`.
"""

from typing import Any

from engine.engine import RequestPosition
from engine.outputs import SequenceOutput, StepOutput, WaitingReason
from engine.sequence import FinishReason
from tokenmill.protocol.records import Accepted, Cancelled, Gap, Lost, Outcome, Write
from tokenmill.protocol.store.task_store import TaskStore
from worker.context import WorkerContext
from worker.output_queue import Failed, Forget, Message, Positions
from worker.ownership import Ownership
from worker.stream import Stream

IDLE_SECONDS = 0.25

_NOT_WAITING = {"waiting_for": "", "position": "", "tokens_ahead": ""}


class Publisher:
    """Keeps one `Stream` for each request that has something to store. `turn` belongs to one thread.

    `client`: writes reports of steps, after the tokens; None: none are written.
    """

    def __init__(self, store: TaskStore, context: WorkerContext, client: Any = None) -> None:
        self.num_completed = 0
        self.num_failed = 0
        self._store = store
        self._context = context
        self._client = client
        self._queue = context.outputs
        self._streams: dict[str, Stream] = {}
        self._waiting_ids: set[str] = set()
        self._num_unstored = 0

    def turn(self) -> None:
        """Store what has arrived; wait a moment for it if there is nothing to store.

        Raises `RedisError`. Nothing is lost: the next turn sends the same again.
        """
        for message in self._queue.take(0.0 if self._num_unstored else IDLE_SECONDS):
            self._receive(message)
        self._update_backlog()
        streams = [stream for stream in self._streams.values() if stream.has_unstored]
        if streams:
            self._publish(streams)
            self._update_backlog()
        if self._client is not None:
            self._context.steps.write(self._client)

    @property
    def is_drained(self) -> bool:
        """Whether everything that was put in the queue is stored."""
        return self._queue.is_empty and not any(stream.has_unstored for stream in self._streams.values())

    @property
    def request_ids(self) -> set[str]:
        """The requests whose outputs are stored."""
        return set(self._streams)

    def _receive(self, message: Message) -> None:
        match message:
            case Stream():
                self._open(message)
            case StepOutput():
                self._add_step(message)
            case Positions(positions):
                self._record_positions(positions)
            case Failed(request_id, error):
                if (stream := self._streams.get(request_id)) and not stream.has_ended:
                    stream.fail(error)
            case Forget(request_id, is_cancelled):
                self._drop(request_id, is_cancelled=is_cancelled)

    def _open(self, stream: Stream) -> None:
        # A task that was lost or cancelled while it was prepared was forgotten before this.
        if stream.ownership in self._context.owned_tasks:
            self._streams[stream.ownership.request_id] = stream

    def _add_step(self, step: StepOutput) -> None:
        self._context.steps.add(step.report, self._tenant_of)
        for request_id in step.started:
            # The age of the decision to start it. The first token is a result of the same step.
            seconds = step.report.seconds_since_decision
            if stream := self._streams.get(request_id):
                stream.trace.scheduled(self._context.clock() - seconds)
            self._record(request_id, {"scheduled": f"{seconds:.6f}", **_NOT_WAITING})
        errors = [error for output in step.outputs if (error := self._try_add(output))]
        self._queue.note_taken(len(step.outputs))
        if errors:
            raise errors[0]

    def _tenant_of(self, request_id: str) -> str:
        """Empty if the request is not this worker's any more: its id is then hidden."""
        stream = self._streams.get(request_id)
        return stream.tenant if stream else ""

    def _try_add(self, output: SequenceOutput) -> BaseException | None:
        """Return the error, if any. The stream is then closed, since its next message would leave a gap."""
        try:
            self._add(output)
        except BaseException as error:  # noqa: BLE001 - raised after the other outputs are added
            self._streams.pop(output.request_id, None)
            return error
        return None

    def _add(self, output: SequenceOutput) -> None:
        if output.finish_reason is FinishReason.CANCELLED:
            # The script that cancelled the task wrote its end.
            self._drop(output.request_id, is_cancelled=True)
        elif (stream := self._streams.get(output.request_id)) and not stream.has_ended:
            stream.add(output)
            if stream.trace.first_token is None and output.token_id is not None:
                stream.trace.first_token = self._context.clock()

    def _record_positions(self, positions: list[RequestPosition]) -> None:
        for one in positions:
            self._record(one.request_id, _facts_of(one))
        waiting_ids = {one.request_id for one in positions}
        # A preempted request that resumes is not reported as started.
        for request_id in self._waiting_ids - waiting_ids:
            self._record(request_id, _NOT_WAITING)
        self._waiting_ids = waiting_ids
        # A request that waits for its grammar is not idle: the grammar is being compiled.
        self._queue.idle_ids = {
            one.request_id for one in positions if one.reason is not WaitingReason.GRAMMAR
        }

    def _record(self, request_id: str, facts: dict[str, str]) -> None:
        if stream := self._streams.get(request_id):
            stream.record(facts)

    def _publish(self, streams: list[Stream]) -> None:
        writes = [self._to_write(stream) for stream in streams]
        outcomes = self._store.publish(writes)
        num_stored = sum(
            self._apply(stream, write, outcome)
            for stream, write, outcome in zip(streams, writes, outcomes, strict=True)
        )
        # One call for all, since a metric takes a lock and this thread competes with the loop.
        self._context.metrics.published(num_stored)

    def _to_write(self, stream: Stream) -> Write:
        try:
            return stream.to_write()
        except BaseException:
            # This turn fails. Without this stream the next one stores the others.
            self._close(stream.ownership)
            raise

    def _apply(self, stream: Stream, write: Write, outcome: Outcome) -> int:
        """Update the stream by the reply to its write. Returns the number of messages stored."""
        match outcome:
            case Accepted():
                self._accepted(stream, write)
                return len(write.entries)
            case Gap(length):
                stream.rewind(length)
            case Lost():
                self._close(stream.ownership)
                self._context.drop_lost(stream.ownership)
            case Cancelled():
                self._drop(stream.ownership.request_id, is_cancelled=True)
                self._context.drop_cancelled(stream.ownership)
        return 0

    def _accepted(self, stream: Stream, write: Write) -> None:
        stream.mark_stored(write)
        if write.entries or write.settlement:
            self._context.isolation.finish(stream.ownership)
        if write.settlement:
            self._close(stream.ownership)
            self._context.owned_tasks.drop(stream.ownership)
            stream.trace.ended(write.settlement, self._context.clock(), stream.error_code)
            is_completed = write.settlement.status == "completed"
            self.num_completed += is_completed
            self.num_failed += not is_completed

    def _drop(self, request_id: str, *, is_cancelled: bool) -> None:
        """Store nothing more of a request, if its stream is open."""
        stream = self._streams.pop(request_id, None)
        if stream and is_cancelled:
            stream.trace.cancelled(
                self._context.clock(),
                prompt_tokens=stream.num_prompt_tokens,
                completion_tokens=stream.num_tokens,
            )

    def _close(self, ownership: Ownership) -> None:
        del self._streams[ownership.request_id]

    def _update_backlog(self) -> None:
        self._num_unstored = sum(stream.num_unstored for stream in self._streams.values())
        self._queue.set_unstored(self._num_unstored)
        self._context.metrics.publish_backlog(self._queue.backlog)


def _facts_of(position: RequestPosition) -> dict[str, str]:
    return {
        "waiting_for": position.reason.value,
        "position": str(position.requests_ahead),
        "tokens_ahead": str(position.tokens_ahead),
    }
