"""Those who look on: the steps' observers and the watchdog. One verb each, and no way to hurt the loop."""

import faulthandler
import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from engine.outputs import StepReport

logger = logging.getLogger(__name__)

ARM_SECONDS = 1.0
"""A loop that goes round sets the watchdog anew so often: each time starts a thread."""


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


def arm_watchdog(seconds: float) -> None:
    """End the process, with the stack of each thread on stderr, unless armed again within `seconds`.

    A C thread does it: a Python one never runs while native code holds the interpreter's lock.
    """
    faulthandler.dump_traceback_later(seconds, exit=True)


class Pulse:
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
        # Arming starts a thread, and others are asked: once a second is enough.
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
