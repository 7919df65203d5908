"""Those who look on: the steps' observers and the watchdog. One verb each, and no way to hurt the loop."""

import contextlib
import ctypes
import faulthandler
import logging
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from engine.outputs import StepReport

logger = logging.getLogger(__name__)

ARM_SECONDS = 1.0
"""A loop that goes round arms the watchdog again so often: each time is a write to another process."""
WATCHDOG = Path(__file__).with_name("watchdog_process.py")


class Observer(Protocol):
    def observe(self, report: StepReport) -> None: ...


class Observers:
    """Passes each report on. What an observer raises is logged once for each observer, and counted."""

    def __init__(self, observers: Sequence[Observer], on_error: Callable[[], None]) -> None:
        self._observers = observers
        self._on_error = on_error
        self._logged: set[Observer] = set()

    def observe(self, report: StepReport) -> None:
        for observer in self._observers:
            try:
                observer.observe(report)
            except Exception:  # an observer is anybody's code, and steps are worth more than their numbers
                self._on_error()
                if observer not in self._logged:
                    self._logged.add(observer)
                    logger.exception("an observer failed; the loop goes on without its numbers")


class WatchdogProcess:
    """Ends this process, with the stack of each thread on stderr and exit status 1, unless armed again in
    time.

    Another process does it (`worker/watchdog_process.py`), by a signal whose handler is native code: neither
    needs the interpreter's lock. Time in which this process did not run does not count. `arm` may be called
    by any thread.
    """

    def __init__(self) -> None:
        self._arming = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def arm(self, seconds: float) -> None:
        """End the process after `seconds`, in place of what was set before."""
        with self._arming:
            try:
                self._send(seconds)
            except OSError:
                # It was killed, or could not be started.
                self._stop()
                self._restart(seconds)

    def close(self) -> None:
        """Never end the process. For tests."""
        with self._arming:
            self._stop()

    def _restart(self, seconds: float) -> None:
        try:
            self._send(seconds)
        except OSError as error:
            logger.warning("no watchdog process, a timer takes its place: %s", error)
            faulthandler.dump_traceback_later(min(seconds, threading.TIMEOUT_MAX / 2), exit=True)

    def _send(self, seconds: float) -> None:
        if self._process is None:
            self._process = self._start()
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds:.3f}\n".encode())

    def _start(self) -> "subprocess.Popen[bytes]":
        number = _install_end()
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


def _install_end() -> signal.Signals:
    """Lets a signal write the stacks and end the process, in native code. Returns the signal.

    The exit status is the number of the signal, as the handler is libc's `_exit`: 1, that of SIGHUP, unless
    hang-ups are ignored, as by nohup.
    """
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    number = signal.SIGUSR2 if ignored else signal.SIGHUP
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    libc.signal(int(number), ctypes.cast(libc._exit, ctypes.c_void_p))
    faulthandler.register(number, file=sys.__stderr__ or 2, all_threads=True, chain=True)
    return number


_OF_THIS_PROCESS = WatchdogProcess()
"""A process has one, as it has one set of signal handlers."""


def arm_watchdog(seconds: float) -> None:
    """End this process after `seconds` unless called again: see `WatchdogProcess`."""
    _OF_THIS_PROCESS.arm(seconds)


class Watchdog:
    """The loop's sign of life: the time of its last turn, and the watchdog that waits for the next one.

    `is_hanging`: whether another thread, without which no request goes on, hangs; then ticks are none.
    """

    def __init__(
        self,
        stall_seconds: float,
        clock: Callable[[], float],
        *,
        on_tick: Callable[[], None],
        is_hanging: Callable[[], bool] = lambda: False,
        arm: Callable[[float], None] = arm_watchdog,
    ) -> None:
        self._stall_seconds = stall_seconds
        self._clock = clock
        self._on_tick = on_tick
        self._is_hanging = is_hanging
        self._arm = arm
        self._last = clock()
        self._next_arming = self._last
        self._arming = threading.Lock()

    def tick(self) -> None:
        now = self._clock()
        # Arming writes to a pipe, and others are asked: once a second is enough.
        if now < self._next_arming:
            self._last = now
        elif not self._is_hanging():
            self._last = now
            with self._arming:
                self._arm_again(now)
            self._on_tick()

    def end_within(self, seconds: float) -> None:
        """End the process after so long whatever happens, ticks included."""
        with self._arming:
            self._next_arming = math.inf
            self._arm(seconds)

    def _arm_again(self, now: float) -> None:
        # Unless the end was set meanwhile.
        if now >= self._next_arming:
            self._next_arming = now + ARM_SECONDS
            # The last tick comes up to that much later. A step has all of its time from there, and a loop
            # that hangs is told to be stalled before the process ends.
            self._arm(self._stall_seconds + ARM_SECONDS)

    @property
    def is_stalled(self) -> bool:
        return self._clock() - self._last > self._stall_seconds
