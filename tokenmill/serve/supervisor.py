"""Starts the processes of a service, restarts those that exit, and stops all in reverse order.

Invariants: no task is lost, however a run ends. No process is left running unless the supervisor is killed;
the next run stops what it left (`take_over.py`). The API stops first, so that no new task arrives; then the
workers, which finish or return theirs; Redis last.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby

from tokenmill.serve.child_processes import Child, ChildSpec, ProcessId
from tokenmill.serve.errors import CannotServe, FatalExit
from tokenmill.serve.restart_backoff import RestartBackoff
from tokenmill.serve.run_record import RunRecord
from tokenmill.serve.state_directory import SELF, StateDirectory, check_free_space
from tokenmill.serve.stop_signals import StopSignals
from tokenmill.serve.stopping import describe_exit, stop_together

_READY_POLL_SECONDS = 1.0
_SPACE_POLL_SECONDS = 1.0
_RECORD_RETRY_SECONDS = 5.0
_IDLE_SECONDS = 60.0


@dataclass
class SupervisedProcess:
    """A process that is kept running. `child` is None between an exit and the restart at `restart_at`.

    `waits_for_space`: the last restart was put off because the disk is full.
    """

    spec: ChildSpec
    child: Child | None = None
    backoff: RestartBackoff = field(default_factory=RestartBackoff)
    restart_at: float = 0.0
    waits_for_space: bool = False


class Supervisor:
    """One run. Every child inherits the descriptor `lock`.

    `print_line(name, text)` prints a line of a child, or of the supervisor itself (`SELF`).
    """

    def __init__(
        self,
        state: StateDirectory,
        lock: int,
        signals: StopSignals,
        print_line: Callable[[str, str], None],
    ) -> None:
        self._state = state
        self._lock = lock
        self._signals = signals
        self._print = print_line
        self._processes: list[SupervisedProcess] = []
        self._was_ready = False
        self.record = RunRecord(state, print_line)

    def start(self, spec: ChildSpec) -> Child:
        """Start a child and keep it running from now on. Raises `CannotServe`."""
        if reason := _full_disk(spec):
            raise CannotServe(reason)
        try:
            child = Child(spec, (self._lock,), self._print)
        except OSError as error:
            raise CannotServe(f"the {spec.name} cannot be started: {error.strerror}") from error
        self._processes.append(SupervisedProcess(spec, child))
        self._record_processes()
        return child

    def watch(self, is_ready: Callable[[], bool], on_ready: Callable[[], None]) -> None:
        """Keep all children running until a stop is requested.

        `on_ready` is called once, when `is_ready` returns True for the first time. From then on every child
        is restarted, whatever its exit code: its settings have worked.

        Raises `StopRequested`; before the service was ready also `CannotServe` for a crash loop and
        `FatalExit` for a fatal exit code.
        """
        while True:
            for process in self._processes:
                self._check(process)
            if not self._was_ready and is_ready():
                self._was_ready = True
                on_ready()
            self.record.write_pending()
            self._signals.wait_or_stop(self._idle_seconds())

    def stop(self) -> None:
        """Stop every child, the last started first and those of a stop group together; delete the record."""
        for _, group in groupby(
            reversed(self._processes), lambda each: each.spec.stop_group or each.spec.name
        ):
            stop_together([each.child for each in group if each.child], self._signals, self._print)
        self._state.delete_record()

    def _check(self, process: SupervisedProcess) -> None:
        if process.child is None:
            if time.monotonic() >= process.restart_at:
                self._restart(process)
        elif process.child.returncode is not None:
            self._handle_exit(process, process.child)

    def _handle_exit(self, process: SupervisedProcess, child: Child) -> None:
        child.finish_output()
        process.child = None
        process.backoff = process.backoff.after_exit(child.uptime, was_ready=self._was_ready)
        process.restart_at = time.monotonic() + process.backoff.delay
        name, end = process.spec.name, describe_exit(child.returncode)
        if not self._was_ready:
            if child.returncode in process.spec.fatal_exit_codes:
                raise FatalExit(f"the {name} {end}{_last_output(child)}")
            if process.backoff.is_crash_loop:
                raise CannotServe(f"the {name} {end}{_last_output(child)}")
        often = f" {process.backoff.early_exits} times in a row" if process.backoff.is_crash_loop else ""
        self._print(SELF, f"the {name} {end}{often}; starting it again in {process.backoff.delay:g} s")

    def _restart(self, process: SupervisedProcess) -> None:
        if reason := _full_disk(process.spec):
            self._wait_for_space(process, reason)
            return
        if process.waits_for_space:
            # The exits were due to the full disk alone.
            process.waits_for_space, process.backoff = False, RestartBackoff()
        try:
            process.child = Child(process.spec, (self._lock,), self._print)
        except OSError as error:
            process.backoff = process.backoff.after_exit(0.0, was_ready=self._was_ready)
            process.restart_at = time.monotonic() + process.backoff.delay
            reason = f"the {process.spec.name} cannot be started: {error.strerror}"
            self._print(SELF, f"{reason}; trying again in {process.backoff.delay:g} s")
        else:
            self._record_processes()

    def _wait_for_space(self, process: SupervisedProcess, reason: str) -> None:
        process.restart_at = time.monotonic() + _SPACE_POLL_SECONDS
        if not process.waits_for_space:
            self._print(SELF, f"{reason}; the {process.spec.name} is started again once it can be written")
        process.waits_for_space = True

    def _record_processes(self) -> None:
        running = {each.spec.name: each.child.id for each in reversed(self._processes) if each.child}
        self.record.set_processes({SELF: ProcessId.own(), **running})

    def _idle_seconds(self) -> float:
        """Until there is something to do even if no signal arrives."""
        waits = [each.restart_at - time.monotonic() for each in self._processes if each.child is None]
        if not self.record.is_written:
            waits.append(_RECORD_RETRY_SECONDS)
        return min([*waits, _IDLE_SECONDS if self._was_ready else _READY_POLL_SECONDS])


def _full_disk(spec: ChildSpec) -> str:
    """Why the child could not write its data; "" if it could."""
    if spec.data is None:
        return ""
    try:
        check_free_space(spec.data)
    except OSError as error:
        return (
            f"{spec.data} cannot be written: {error.strerror}; free some space there, or choose another"
            " directory with TOKENMILL_STATE_DIR"
        )
    return ""


def _last_output(child: Child) -> str:
    """Repeated in the last line of `serve`: the output of the other children that stop hides it."""
    if child.spec.log:
        return f"; its output is in {child.spec.log}"
    return f"; its last line: {child.last_line}" if child.last_line else "; it printed nothing"
