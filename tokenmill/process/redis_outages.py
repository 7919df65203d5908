"""Logs an outage of Redis once when it begins and once when it ends, however many calls fail in between."""

import threading
import time
from collections.abc import Callable

from structlog.typing import FilteringBoundLogger

QUIET_SECONDS = 5.0
"""An outage ends with the first successful call after this time without a failed one."""


class OutageLog:
    """Thread-safe. `what`: the caller of Redis. `clock`: monotonic seconds."""

    def __init__(
        self, logger: FilteringBoundLogger, what: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger = logger
        self._what = what
        self._clock = clock
        self._lock = threading.Lock()
        self._began: float | None = None
        self._failed_at = 0.0
        self._num_failed = 0

    def failed(self, error: Exception) -> None:
        """Record a failed call."""
        with self._lock:
            self._failed_at = self._clock()
            self._num_failed += 1
            if self._began is not None:
                return
            self._began = self._failed_at
        self._logger.warning("Redis fails, retrying until it answers", caller=self._what, error=str(error))

    def worked(self) -> None:
        """Record a successful call."""
        if self._began is None:
            return
        with self._lock:
            if self._began is None or self._clock() - self._failed_at < QUIET_SECONDS:
                return
            seconds, failed = self._failed_at - self._began, self._num_failed
            self._began, self._num_failed = None, 0
        self._logger.warning(
            "Redis answers again", caller=self._what, failed_calls=failed, seconds=round(seconds, 1)
        )
