"""Messages to the publisher, in order, and the count of outputs that Redis does not have yet."""

import queue
import threading
from collections.abc import Iterator, Set
from dataclasses import dataclass

from engine.engine import RequestPosition
from engine.outputs import StepOutput
from tokenmill.protocol.messages import TaskError
from worker.stream import Stream

MAX_BACKLOG = 4096
"""Outputs that may wait for Redis before the loop stops stepping: about one minute of slow steps of 64
sequences.
"""


@dataclass(frozen=True, slots=True)
class Positions:
    """All requests that wait in the scheduler. A request that is missing here does not wait any more."""

    positions: list[RequestPosition]


@dataclass(frozen=True, slots=True)
class Failed:
    """The engine did not accept the request."""

    request_id: str
    error: TaskError


@dataclass(frozen=True, slots=True)
class Forget:
    """The request is not this worker's any more. Its outputs are not stored."""

    request_id: str
    is_cancelled: bool = False


Message = Stream | StepOutput | Positions | Failed | Forget


class OutputQueue:
    """Any thread puts, the publisher takes. Putting never blocks."""

    def __init__(self, max_backlog: int = MAX_BACKLOG) -> None:
        self._max_backlog = max_backlog
        self._messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._has_room = threading.Event()
        # Each counter has one writer: the loop writes the first, the publisher the other two.
        self._num_put = 0
        self._num_taken = 0
        self._num_unstored = 0
        # Replaced as a whole and never modified, since other threads read it.
        self.idle_ids: Set[str] = frozenset()
        """Requests that only wait in the scheduler, by the latest `Positions`. Set by the publisher."""

    def open(self, stream: Stream) -> None:
        """Store the outputs of the stream's request from here on."""
        self._messages.put(stream)

    def put(self, output: StepOutput) -> None:
        self._num_put += len(output.outputs)
        self._messages.put(output)

    def put_positions(self, positions: list[RequestPosition]) -> None:
        self._messages.put(Positions(positions))

    def fail(self, request_id: str, error: TaskError) -> None:
        self._messages.put(Failed(request_id, error))

    def forget(self, request_id: str, *, is_cancelled: bool = False) -> None:
        self._messages.put(Forget(request_id, is_cancelled))

    @property
    def backlog(self) -> int:
        """Outputs that Redis is not known to have."""
        return self._num_put - self._num_taken + self._num_unstored

    @property
    def is_full(self) -> bool:
        return self.backlog >= self._max_backlog

    def wait_for_room(self, seconds: float) -> None:
        self._has_room.clear()
        if self.is_full:
            self._has_room.wait(seconds)

    # For the publisher's thread.

    @property
    def is_empty(self) -> bool:
        return self._messages.empty()

    def take(self, wait_seconds: float) -> Iterator[Message]:
        """Yield all messages, waiting up to `wait_seconds` for the first.

        A message is removed as it is yielded: if the caller fails, the next call yields those after it.
        """
        try:
            if wait_seconds:
                yield self._messages.get(timeout=wait_seconds)
            while True:
                yield self._messages.get_nowait()
        except queue.Empty:
            return

    def note_taken(self, num_outputs: int) -> None:
        """The publisher has `num_outputs` more outputs in its streams."""
        self._num_taken += num_outputs

    def set_unstored(self, num_outputs: int) -> None:
        """The publisher's streams hold `num_outputs` that are not stored."""
        self._num_unstored = num_outputs
        if not self.is_full:
            self._has_room.set()
