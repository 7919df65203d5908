"""What the threads of one worker share: settings, queues between the threads, and the tasks the worker owns.

Invariant: a task that is lost or cancelled is dropped in every part of the worker by one method here.
"""

import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import structlog

from engine.errors import EngineDead
from monitoring.worker import WorkerMetrics
from tokenmill.process.redis_outages import OutageLog
from tokenmill.protocol.records import ModelCard, TaskPhase, WorkerState
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.declarations import Timing
from worker.connections import Connect
from worker.inbox import Cancel, Discard, Inbox
from worker.isolation import IsolatedRetries
from worker.output_queue import OutputQueue
from worker.ownership import OwnedTasks, Ownership
from worker.preparation import ServedModel
from worker.step_stream import StepStream
from worker.watchdog import Observer, Watchdog, arm_watchdog

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ThreadFailure:
    """A thread ended with an error."""

    thread: str
    error: BaseException


StopReason = str | ThreadFailure


def new_worker_name() -> str:
    """A unique name. RQ refuses the name of a worker that ended without removing its record."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"


@dataclass(kw_only=True, eq=False)
class WorkerContext:
    """The state that all threads of a worker share. Attributes of `__post_init__` are built from the fields.

    `connect` creates the Redis client of a thread. `card`: what the API needs to know about the model. It is
    written again if Redis loses it. `fair_sharing`: tenants share claims fairly. `observers` receive the
    report of each step. `clock`: monotonic seconds. `arm(seconds)` ends the process unless it is called
    again in time.
    """

    model: ServedModel
    connect: Connect
    metrics: WorkerMetrics
    name: str = field(default_factory=new_worker_name)
    card: ModelCard | None = None
    timing: Timing = field(default_factory=Timing)
    fair_sharing: bool = True
    observers: Sequence[Observer] = ()
    outputs: OutputQueue = field(default_factory=OutputQueue)
    wake: threading.Event = field(default_factory=threading.Event)
    """Set when more tasks may be claimed."""
    clock: Callable[[], float] = time.monotonic
    arm: Callable[[float], None] = arm_watchdog

    def __post_init__(self) -> None:
        self.is_draining = False
        # A SimpleQueue is reentrant, which a signal handler needs; an Event is not.
        self.stop_reasons: queue.SimpleQueue[StopReason] = queue.SimpleQueue()
        self.inbox = Inbox()
        self.owned_tasks = OwnedTasks(self.wake)
        self.isolation = IsolatedRetries(self.inbox, self.wake, self.clock)
        self.watchdog = Watchdog(self.timing.stall_seconds, self.clock, self.metrics, arm=self.arm)
        self.steps = StepStream(self.name, self.clock, self.metrics)
        self.outages = OutageLog(_log, "worker", self.clock)

    @property
    def state(self) -> WorkerState:
        """The state that the worker reports to others."""
        if self.is_draining:
            return "draining"
        return "stalled" if self.watchdog.is_stalled or self.watchdog.failing_threads else "ready"

    def new_store(self, client: Any) -> TaskStore:
        return TaskStore(client, retention_seconds=self.timing.retention_seconds)

    def stop(self, reason: str) -> None:
        """Ask the main thread to stop the worker. Safe in signal handlers and from any thread."""
        self.stop_reasons.put(reason)

    def thread_failed(self, thread: str, error: BaseException) -> None:
        """Log the error and ask the main thread to end the worker."""
        # First, since logging may fail too when memory is short.
        self.stop_reasons.put(ThreadFailure(thread, error))
        trace = None if isinstance(error, EngineDead) else error
        _log.critical(
            "a thread failed", thread=thread, error=f"{type(error).__name__}: {error}", exc_info=trace
        )

    def phases(self, owners: Mapping[str, str]) -> dict[str, TaskPhase]:
        """The phase of each task of `owners` (task -> owner), recorded in case this worker dies."""
        return self.isolation.phases(owners, self.outputs.idle_ids)

    def drop_lost(self, ownership: Ownership) -> None:
        """Drop a task that another worker owns now, or that has ended elsewhere."""
        # A task that was cancelled before is dropped already.
        if self.owned_tasks.drop(ownership):
            self.metrics.lost(1)
            self.inbox.put(Discard(ownership))
        self.outputs.forget(ownership.request_id)
        self.isolation.finish(ownership)

    def drop_cancelled(self, ownership: Ownership) -> None:
        """Drop a cancelled task. The cancel wrote its end; the engine still reports it for the metrics."""
        self.owned_tasks.drop(ownership)
        self.inbox.put(Cancel(ownership))
        self.outputs.forget(ownership.request_id, is_cancelled=True)
        self.isolation.finish(ownership)
