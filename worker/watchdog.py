"""The watchdog, which ends a worker whose loop stalls, and the observers of its steps."""

import contextlib
import ctypes
import faulthandler
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import structlog

from engine.outputs import StepReport
from monitoring.worker import WorkerMetrics

_log = structlog.get_logger(__name__)

ARM_SECONDS = 1.0
"""Interval at which a live loop arms the watchdog again. Each time is a write to another process."""
FAILING_SECONDS = 10.0
"""A thread is reported as failing when no turn of it has succeeded for this time."""
WATCHDOG = Path(__file__).with_name("watchdog_process.py")


class Observer(Protocol):
    def observe(self, report: StepReport) -> None: ...


class WatchedThread(Protocol):
    """The part of `worker.service.Service` that the watchdog uses."""

    name: str

    def is_stalled(self, seconds: float) -> bool: ...
    def is_failing(self, seconds: float) -> bool: ...


class Observers:
    """Passes each report to all observers. An observer's errors are counted, and the first is logged."""

    def __init__(self, observers: Sequence[Observer], metrics: WorkerMetrics) -> None:
        self._observers = observers
        self._metrics = metrics
        self._logged: set[Observer] = set()

    def observe(self, report: StepReport) -> None:
        for observer in self._observers:
            try:
                observer.observe(report)
            except Exception:  # noqa: BLE001 - an observer may be any code, and must not stop the loop
                self._metrics.observer_error()
                if observer not in self._logged:
                    self._logged.add(observer)
                    _log.exception("an observer failed; the loop continues")


class WatchdogProcess:
    """Ends this process unless it is armed again in time: stacks of all threads on stderr, exit status 1.

    Another process (`worker/watchdog_process.py`) sends a signal whose handler is native code. Neither needs
    the interpreter's lock. Time in which this process does not run does not count. `arm` is thread-safe.
    """

    def __init__(self) -> None:
        self._arming = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def arm(self, seconds: float) -> None:
        """End the process after `seconds`. Replaces the previous deadline."""
        with self._arming:
            try:
                self._send(seconds)
            except OSError:
                # The watchdog process was killed or could not be started.
                self._stop()
                self._restart(seconds)

    @property
    def pid(self) -> int | None:
        """The process that watches this one, if it runs."""
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        """Remove the deadline."""
        with self._arming:
            self._stop()
            faulthandler.cancel_dump_traceback_later()

    def _restart(self, seconds: float) -> None:
        try:
            self._send(seconds)
        except OSError as error:
            _log.warning("the watchdog process cannot run, a timer replaces it", error=str(error))
            faulthandler.dump_traceback_later(min(seconds, threading.TIMEOUT_MAX / 2), exit=True)

    def _send(self, seconds: float) -> None:
        if self._process is None:
            self._process = self._start()
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds:.3f}\n".encode())

    def _start(self) -> "subprocess.Popen[bytes]":
        number = _install_handler()
        return subprocess.Popen(
            [sys.executable, "-I", "-S", str(WATCHDOG), str(os.getpid()), str(int(number))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
            process.kill()
            process.wait()


def _install_handler() -> signal.Signals:
    """Make a signal write the stacks and end the process, in native code. Returns the signal.

    The handler is libc's `_exit`, which takes the signal's number as the exit status: 1 for SIGHUP. If SIGHUP
    is ignored, as under nohup, SIGUSR2 takes its place.
    """
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    number = signal.SIGUSR2 if ignored else signal.SIGHUP
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(int(number), ctypes.cast(libc._exit, ctypes.c_void_p))
    faulthandler.register(number, file=sys.__stderr__ or 2, all_threads=True, chain=True)
    return number


_OF_THIS_PROCESS = WatchdogProcess()
"""One for each process, like its signal handlers."""


def arm_watchdog(seconds: float) -> None:
    """End this process after `seconds` unless called again: see `WatchdogProcess`."""
    _OF_THIS_PROCESS.arm(seconds)


def disarm_watchdog() -> None:
    """Remove the deadline of this process."""
    _OF_THIS_PROCESS.close()


class Watchdog:
    """Watches the loop by its ticks, and the other threads by their turns. `clock`: monotonic seconds.

    Ticks do not count while another thread stalls, since no request progresses then.
    """

    def __init__(
        self,
        stall_seconds: float,
        clock: Callable[[], float],
        metrics: WorkerMetrics,
        *,
        arm: Callable[[float], None] = arm_watchdog,
    ) -> None:
        self._stall_seconds = stall_seconds
        self._clock = clock
        self._metrics = metrics
        self._arm = arm
        self._threads: Sequence[WatchedThread] = ()
        self._last_tick = clock()
        self._next_arming = self._last_tick
        self._arming = threading.Lock()

    def watch(self, threads: Sequence[WatchedThread]) -> None:
        self._threads = threads

    def tick(self) -> None:
        now = self._clock()
        # Once a second is enough: arming writes to a pipe.
        if now < self._next_arming:
            self._last_tick = now
        elif not any(thread.is_stalled(self._stall_seconds) for thread in self._threads):
            self._last_tick = now
            with self._arming:
                self._arm_again(now)
            self._metrics.tick()

    def end_within(self, seconds: float) -> None:
        """End the process after `seconds` in any case. Later ticks do not postpone it."""
        with self._arming:
            self._next_arming = math.inf
            self._arm(seconds)

    @property
    def is_stalled(self) -> bool:
        return self._clock() - self._last_tick > self._stall_seconds

    @property
    def failing_threads(self) -> list[str]:
        """Names of the threads in which no turn has succeeded for `FAILING_SECONDS`."""
        return [thread.name for thread in self._threads if thread.is_failing(FAILING_SECONDS)]

    def _arm_again(self, now: float) -> None:
        # `end_within` may have been called meanwhile.
        if now >= self._next_arming:
            self._next_arming = now + ARM_SECONDS
            # The last tick may come up to ARM_SECONDS later. A step then still has its full time, and a
            # stalled loop is reported before the process ends.
            self._arm(self._stall_seconds + ARM_SECONDS)
