"""A worker that runs many RQ jobs at once: it starts the threads, waits for a reason to stop, and stops them.

Invariants: signal handlers only queue a reason to stop, and the main thread acts on it. However the worker
ends, its tasks return to the front of their queues, and the process ends within a bounded time.
"""

import queue
import signal

import structlog

from tokenmill.protocol.records import WorkerState
from worker.context import StopReason, ThreadFailure, WorkerContext
from worker.loop import SteppingEngine
from worker.threads import WorkerThreads

_log = structlog.get_logger(__name__)

EXIT_STOPPED = 0
"""Stopped by a signal or by RQ's `shutdown` command."""
EXIT_FAILED = 70
"""The engine or a thread failed. The tasks were handed back; the worker can be started again."""

REQUEST_THREADS = frozenset({"loop", "publisher"})
"""Threads in which an error may be the fault of a request. The intake catches errors of preparation."""

SHUTDOWN_SECONDS = 14.0
"""Deadline of the process after the grace period. Supervisors kill it after 15 s.

The phases below add up to 13 s. A call to Redis that blocks at the end of a phase may add some seconds; if
that exceeds the deadline, the leases of the owned tasks lapse.
"""
LAST_STEP_SECONDS = 4.0
FLUSH_SECONDS = 4.0
HAND_BACK_SECONDS = 3.0
SIGN_OFF_SECONDS = 2.0
DRAIN_POLL_SECONDS = 0.05
SIGNAL_POLL_SECONDS = 1.0


class BatchWorker:
    """Serves one model with one engine."""

    def __init__(self, engine: SteppingEngine, context: WorkerContext) -> None:
        self.context = context
        self.threads = WorkerThreads(engine, context)
        self._has_crashed = False
        self._last_step_seconds = LAST_STEP_SECONDS

    @property
    def name(self) -> str:
        return self.context.name

    @property
    def state(self) -> WorkerState:
        return self.context.state

    def work(self) -> int:
        """Work until a signal, a command or a failure stops the worker. Returns the exit status."""
        self.threads.start()
        _log.info("serving", model=self.context.model.name)
        try:
            reason = self._wait_for_stop()
            if not isinstance(reason, ThreadFailure):
                reason = self._drain(reason)
            return self._exit_status(reason)
        finally:
            self.shut_down()

    def stop(self, reason: str) -> None:
        """Drain and stop; a second call stops at once. Safe in signal handlers and from any thread."""
        self.context.stop(reason)

    def handle_signals(self) -> None:
        """Let SIGTERM and SIGINT stop this worker. Call from the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda received, _: self.stop(signal.Signals(received).name))

    def shut_down(self) -> None:
        """Stop the threads in order, each within its time, and hand back what is still owned."""
        self.context.is_draining = True
        self.context.watchdog.end_within(SHUTDOWN_SECONDS)
        self.threads.stop_stepping(self._last_step_seconds, claim_seconds=LAST_STEP_SECONDS)
        self.threads.flush(FLUSH_SECONDS)
        self.threads.hand_back(HAND_BACK_SECONDS, crashed=self._has_crashed)
        self.threads.stop(SIGN_OFF_SECONDS)
        self.threads.registration.remove()

    def _wait_for_stop(self) -> StopReason:
        """Wait in short intervals, since a signal that another thread receives does not interrupt a wait."""
        while True:
            try:
                return self.context.stop_reasons.get(timeout=SIGNAL_POLL_SECONDS)
            except queue.Empty:
                continue

    def _drain(self, reason: str) -> StopReason:
        """Claim nothing more and finish the owned tasks, until the grace period ends or a second stop.

        Returns the reason for the end: `reason`, or what came meanwhile.
        """
        _log.info("claiming no more tasks, finishing those owned", reason=str(reason))
        self.context.is_draining = True
        self.threads.stop_claiming()
        deadline = self.context.clock() + self.context.timing.grace_seconds
        while self.threads.has_work and self.context.clock() < deadline:
            try:
                second = self.context.stop_reasons.get(timeout=DRAIN_POLL_SECONDS)
            except queue.Empty:
                continue
            if not isinstance(second, ThreadFailure):
                _log.info("stopping now", reason=str(second))
                self._last_step_seconds = 0.0
            return second
        return reason

    def _exit_status(self, reason: StopReason) -> int:
        if not isinstance(reason, ThreadFailure):
            return EXIT_STOPPED
        # Any error there, of the device or of Python code, may be caused by a request that would end the next
        # worker too.
        self._has_crashed = reason.thread in REQUEST_THREADS
        return EXIT_FAILED
