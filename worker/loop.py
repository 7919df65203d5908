"""The loop: take what came in, step the engine, hand on what came out.

Law: a turn touches in-process queues only, and no request, observer or slow Redis can break it; `EngineDead`
alone ends it. While a request is tried alone nobody else is stepped, and it is prepared here, so that what
hangs in it stops the ticks. Knows neither Redis nor RQ nor a tokenizer.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.config import EngineConfig
from engine.engine import QueuePosition
from engine.errors import InvalidParameter
from engine.outputs import StepOutput
from engine.requests.engine_request import EngineRequest
from tokenmill.protocol.messages import TaskError
from worker.errors import internal_error, invalid_parameter
from worker.inbox import Cancel, Discard, Inbox, Message, PreparedTask, Quiesce, Resume, RetryIsolated
from worker.ownership import OwnedTasks, Ownership
from worker.watchdog import Observers, Watchdog

logger = logging.getLogger(__name__)

IDLE_SECONDS = 0.25
"""An idle loop ticks so often; what comes in wakes it at once."""
TELL_WAITING_SECONDS = 0.5


class SteppingEngine(Protocol):
    """What the loop needs of `engine.Engine`."""

    config: EngineConfig

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
    def serves(self, request_id: str) -> bool: ...
    def step(self, only: str | None = None) -> StepOutput: ...
    def drain(self) -> None: ...
    def waiting(self) -> list[QueuePosition]: ...


class OutputSink(Protocol):
    """Where a step's results go; calls return at once."""

    @property
    def is_full(self) -> bool: ...
    def hand(self, output: StepOutput) -> None: ...
    def tell_waiting(self, line: list[QueuePosition]) -> None: ...
    def fail(self, request_id: str, error: TaskError) -> None: ...
    def wait_for_room(self, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Load:
    """Sequences in the scheduler after a turn."""

    num_running: int = 0
    num_waiting: int = 0


class Loop:
    """Turns, until told to stop. `load` is a value that other threads may read at any time."""

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
        self._next_telling = 0.0
        self._has_told_a_line = False
        # The one that is to be tried, while others are still touched; and the one that is tried.
        self._quiesce: Quiesce | None = None
        self._alone: Ownership | None = None

    def turn(self) -> None:
        """One turn. Raises `EngineDead`; waits only when there is nothing to do or nowhere to put it."""
        self._watchdog.tick()
        self._take_messages()
        self._fall_silent()
        if self._sink.is_full:
            self._sink.wait_for_room(IDLE_SECONDS)
        elif self._has_work or (self._alone is None and self.load != Load()):
            # Once more when all work was discarded, so that observers see an idle engine.
            self._step()

    @property
    def _has_work(self) -> bool:
        """Of those who may be stepped."""
        if self._alone is not None:
            return self._engine.serves(self._alone.request_id)
        return self._engine.has_work

    def _step(self) -> None:
        output = self._engine.step(None if self._alone is None else self._alone.request_id)
        self._sink.hand(output)
        self._tell_waiting()
        self._observers.observe(output.report)
        self._note_load(output)

    def _take_messages(self) -> None:
        for message in self._inbox.take(0.0 if self._has_work else IDLE_SECONDS):
            self._follow(message)

    def _follow(self, message: Message) -> None:
        match message:
            case PreparedTask():
                self._add(message)
            case Cancel(ownership):
                self._engine.cancel(ownership.request_id)
            case Discard(ownership):
                self._engine.discard(ownership.request_id)
            case Quiesce():
                self._quiesce = message
                self._fall_silent()
            case RetryIsolated(ownership, prepare):
                if ownership == self._alone and (task := prepare()):
                    self._add(task)
            case Resume(ownership):
                self._resume(ownership)

    def _fall_silent(self) -> None:
        """As was asked; but grammars of others, which are compiled in threads of their own, come first.

        What the device was given before is done by then: it would be taken for the work of the one tried.
        """
        if self._quiesce and not self._engine.is_compiling:
            self._engine.drain()
            self._alone = self._quiesce.ownership
            self._quiesce.heard.set()
            self._quiesce = None

    def _resume(self, ownership: Ownership) -> None:
        if self._quiesce and self._quiesce.ownership == ownership:
            self._quiesce = None
        if self._alone == ownership:
            self._alone = None

    def _add(self, task: PreparedTask) -> None:
        if task.ownership not in self._owned_tasks:
            return  # lost or cancelled on its way here
        request_id = task.request.request_id
        try:
            self._engine.add(task.request)
        except InvalidParameter as error:
            param = task.prompt_field if error.field == "prompt" else error.field
            self._sink.fail(request_id, invalid_parameter(error, param))
        except Exception:  # one request's fault stays its own
            logger.exception("%s: the engine could not take the request", request_id)
            self._engine.discard(request_id)
            self._sink.fail(request_id, internal_error())

    def _tell_waiting(self) -> None:
        now = self._clock()
        # Once more when nobody waits any longer: who was told to wait is told that it does not.
        if now >= self._next_telling and (self._engine.num_waiting or self._has_told_a_line):
            self._next_telling = now + TELL_WAITING_SECONDS
            line = self._engine.waiting()
            self._sink.tell_waiting(line)
            self._has_told_a_line = bool(line)

    def _note_load(self, output: StepOutput) -> None:
        self.load = Load(self._engine.num_running, self._engine.num_waiting)
        if output.started:
            self._wake.set()  # the line is shorter: more may be claimed
