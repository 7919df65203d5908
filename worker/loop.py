"""The loop thread: takes messages, steps the engine, passes the results on.

A turn uses in-process queues only. No request, observer or slow Redis can end it; only `EngineDead` does.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import structlog

from engine.config import EngineConfig
from engine.engine import RequestPosition
from engine.errors import InvalidParameter
from engine.outputs import StepOutput
from engine.requests.engine_request import EngineRequest
from tokenmill.protocol.messages import TaskError
from worker.errors import internal_error, invalid_parameter
from worker.inbox import Cancel, Discard, Inbox, Message, PreparedTask, Quiesce, Resume, RetryIsolated
from worker.ownership import OwnedTasks, Ownership
from worker.watchdog import Observers, Watchdog

_log = structlog.get_logger(__name__)

IDLE_SECONDS = 0.25
"""Longest wait of an idle turn; a message ends it at once."""
POSITIONS_SECONDS = 0.5
"""Interval at which queue positions are reported."""


class SteppingEngine(Protocol):
    """The part of `engine.engine.Engine` that the loop uses."""

    config: EngineConfig
    records_lanes: bool

    @property
    def has_work(self) -> bool: ...
    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def is_compiling(self) -> bool: ...
    def add(self, request: EngineRequest) -> None: ...
    def cancel(self, request_id: str) -> bool: ...
    def discard(self, request_id: str) -> bool: ...
    def has_request(self, request_id: str) -> bool: ...
    def step(self, isolate_request_id: str | None = None) -> StepOutput: ...
    def drain(self) -> None: ...
    def request_positions(self) -> list[RequestPosition]: ...


class OutputSink(Protocol):
    """Receives the results of steps. Calls return at once, except `wait_for_room`."""

    @property
    def is_full(self) -> bool: ...
    def put(self, output: StepOutput) -> None: ...
    def put_positions(self, positions: list[RequestPosition]) -> None: ...
    def fail(self, request_id: str, error: TaskError) -> None: ...
    def wait_for_room(self, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Load:
    """Number of sequences in the scheduler after a step."""

    num_running: int = 0
    num_waiting: int = 0


class IsolatedMode:
    """The loop's side of an isolated retry: which requests it may step.

    Normal: all. Quiescing: all, until no grammar is being compiled. Isolated: only the suspect, from
    `Quiesce` to `Resume`. Compilations are awaited, and the device is drained, because a crash in either
    would be blamed on the suspect.
    """

    def __init__(self, engine: SteppingEngine) -> None:
        self._engine = engine
        self._quiesce: Quiesce | None = None
        self._suspect: Ownership | None = None

    @property
    def request_id(self) -> str | None:
        """The only request that may be stepped; None: all may."""
        return None if self._suspect is None else self._suspect.request_id

    @property
    def has_work(self) -> bool:
        """A request that may be stepped is unfinished."""
        if self._suspect is not None:
            return self._engine.has_request(self._suspect.request_id)
        return self._engine.has_work

    def isolates(self, ownership: Ownership) -> bool:
        return ownership == self._suspect

    def request(self, quiesce: Quiesce) -> None:
        self._quiesce = quiesce
        self.advance()

    def advance(self) -> None:
        """Change from quiescing to isolated if no grammar is being compiled."""
        if self._quiesce and not self._engine.is_compiling:
            self._engine.drain()
            self._suspect = self._quiesce.ownership
            self._quiesce.heard.set()
            self._quiesce = None

    def resume(self, ownership: Ownership) -> None:
        """Return to normal. A `Resume` for another task is ignored."""
        if self._quiesce and self._quiesce.ownership == ownership:
            self._quiesce = None
        if self._suspect == ownership:
            self._suspect = None


class Loop:
    """`turn` belongs to one thread. `load` may be read by any thread at any time."""

    # One parameter for each part of the worker that a turn uses.
    def __init__(
        self,
        engine: SteppingEngine,
        inbox: Inbox,
        sink: OutputSink,
        owned_tasks: OwnedTasks,
        *,
        observers: Observers,
        watchdog: Watchdog,
        clock: Callable[[], float],
        wake: threading.Event,
        wants_lanes: Callable[[], bool] = lambda: False,
    ) -> None:
        self.load = Load()
        self._engine = engine
        self._inbox = inbox
        self._sink = sink
        self._owned_tasks = owned_tasks
        self._observers = observers
        self._watchdog = watchdog
        self._clock = clock
        self._wake = wake
        self._wants_lanes = wants_lanes
        self._isolated_mode = IsolatedMode(engine)
        self._next_positions_at = 0.0
        self._has_reported_positions = False

    def turn(self) -> None:
        """Handle messages and run one step. Waits only if there is nothing to do, or no room for results.

        Raises `EngineDead`.
        """
        self._watchdog.tick()
        self._handle_messages()
        self._isolated_mode.advance()
        if self._sink.is_full:
            self._sink.wait_for_room(IDLE_SECONDS)
        elif self._has_work:
            self._step()

    @property
    def _has_work(self) -> bool:
        if self._isolated_mode.has_work:
            return True
        # If everything was discarded, one more step shows observers an idle engine.
        return self._isolated_mode.request_id is None and self.load != Load()

    def _handle_messages(self) -> None:
        for message in self._inbox.take(0.0 if self._has_work else IDLE_SECONDS):
            self._handle(message)

    def _handle(self, message: Message) -> None:
        match message:
            case PreparedTask():
                self._add(message)
            case Cancel(ownership):
                self._engine.cancel(ownership.request_id)
            case Discard(ownership):
                self._engine.discard(ownership.request_id)
            case Quiesce():
                self._isolated_mode.request(message)
            case RetryIsolated(ownership, prepare):
                # Prepared in this thread, so that the watchdog notices a preparation that hangs.
                if self._isolated_mode.isolates(ownership) and (task := prepare()):
                    self._add(task)
            case Resume(ownership):
                self._isolated_mode.resume(ownership)

    def _add(self, task: PreparedTask) -> None:
        if task.ownership not in self._owned_tasks:
            return  # The task was lost or cancelled since it was put in the inbox.
        request_id = task.request.request_id
        try:
            self._engine.add(task.request)
        except InvalidParameter as error:
            param = task.prompt_field if error.field == "prompt" else error.field
            self._sink.fail(request_id, invalid_parameter(error, param))
        except Exception:  # noqa: BLE001 - the fault of one request
            _log.exception("the engine could not add the request", task=request_id.partition(":")[0])
            self._engine.discard(request_id)
            self._sink.fail(request_id, internal_error())

    def _step(self) -> None:
        self._engine.records_lanes = self._wants_lanes()
        output = self._engine.step(self._isolated_mode.request_id)
        self._sink.put(output)
        self._report_positions()
        self._observers.observe(output.report)
        self.load = Load(self._engine.num_running, self._engine.num_waiting)
        if output.started:
            self._wake.set()  # The queue is shorter: more tasks may be claimed.

    def _report_positions(self) -> None:
        now = self._clock()
        # An empty list is reported once, for the requests that no longer wait.
        if now >= self._next_positions_at and (self._engine.num_waiting or self._has_reported_positions):
            self._next_positions_at = now + POSITIONS_SECONDS
            positions = self._engine.request_positions()
            self._sink.put_positions(positions)
            self._has_reported_positions = bool(positions)
