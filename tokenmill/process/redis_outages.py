"""Logs an outage of Redis once when it begins and once when it ends, however many calls fail in between."""

import logging
import threading
import time
from collections.abc import Callable

QUIET_SECONDS = 5.0
"""An outage ends with the first successful call after this time without a failed one."""


class OutageLog:
    """Thread-safe. `what`: the caller of Redis. `clock`: monotonic seconds."""

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
        """Record a failed call."""
        with self._lock:
            self._failed_at = self._clock()
            self._num_failed += 1
            if self._began is not None:
                return
            self._began = self._failed_at
        self._logger.warning("%s: Redis fails, retrying until it answers: %s", self._what, error)

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
            "%s: Redis answers again; %d calls failed within %.1f s", self._what, failed, seconds
        )
