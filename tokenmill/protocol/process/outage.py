"""Log lines for an outage of Redis: one when it begins, one when it is over, however many calls fail
meanwhile.
"""

import logging
import threading
import time
from collections.abc import Callable

QUIET_SECONDS = 5.0
"""An outage is over with the first call that works after no call has failed for this time."""


class OutageLog:
    """For any number of threads. `what`: who calls Redis. `clock`: seconds that never go back."""

    def __init__(
        self, logger: logging.Logger, what: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._what = what
        self._clock = clock
        self._lock = threading.Lock()
        self._began: float | None = None
        self._failed_at = 0.0
        self._num_failed = 0

    def failed(self, error: Exception) -> None:
        """A call failed."""
        with self._lock:
            self._failed_at = self._clock()
            self._num_failed += 1
            if self._began is not None:
                return
            self._began = self._failed_at
        self._logger.warning("%s: Redis fails, trying again until it answers: %s", self._what, error)

    def worked(self) -> None:
        """A call worked."""
        if self._began is None:
            return
        with self._lock:
            if self._began is None or self._clock() - self._failed_at < QUIET_SECONDS:
                return
            seconds, failed = self._failed_at - self._began, self._num_failed
            self._began, self._num_failed = None, 0
        self._logger.warning(
            "%s: Redis answers again; %d calls failed within %.1f s", self._what, failed, seconds
        )
