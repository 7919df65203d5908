"""Ends overdue tasks and returns the tasks of dead workers to the queue, even while no worker runs.

Redis decides when a task is overdue and when a lease has expired.
"""

import time
from collections.abc import Callable

import structlog

from api.background.periodic import start_periodic
from api.redis_clients import connect, is_unavailable
from monitoring.reaper import ReapFailures
from tokenmill.process.reaped_tasks import log_reaped
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.declarations import ApiSettings

_log = structlog.get_logger(__name__)

PERIOD_SECONDS = 1.0
"""An overdue task ends at most this late."""
START_SECONDS = 10.0
"""Time after the start in which no lease expires: workers that start together with this process can still
resume their tasks."""
OUTAGE_SECONDS = 60.0
"""The same after an outage of Redis: live workers can renew their leases. Time limits of tasks count from the
end of the outage."""


class Reaper:
    """`clock`: monotonic seconds."""

    def __init__(
        self,
        settings: ApiSettings,
        store: TaskStore,
        failures: ReapFailures,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.store = store
        self._settings = settings
        self._failures = failures
        self._clock = clock
        self._leases_expire_after = clock() + START_SECONDS
        self._failed_at: float | None = None
        """Time of the last run during an outage, until a run succeeds."""

    def run(self) -> float:
        """Run once. Returns the seconds until the next run. Raises nothing."""
        try:
            self._reap()
        except Exception as error:  # noqa: BLE001 - it is logged
            if is_unavailable(error):
                # The client has logged the outage.
                self._failed_at = self._clock()
                self._leases_expire_after = self._failed_at + OUTAGE_SECONDS
            else:
                self._failures.failed("reaper")
                _log.exception("the reaper failed; it will run again")
        return PERIOD_SECONDS

    def _reap(self) -> None:
        now = self._clock()
        reaped = self.store.reap(
            self._settings.slug,
            max_task_seconds=self._settings.max_task_seconds,
            reclaim_leases=now >= self._leases_expire_after,
            failed_seconds_ago=None if self._failed_at is None else now - self._failed_at,
        )
        self._failed_at = None
        for failure in reaped.failures:
            self._failures.failed(failure.duty)
        log_reaped(reaped)


def start_reaper(settings: ApiSettings, failures: ReapFailures) -> None:
    """Start the thread. It ends with the process."""
    store = TaskStore(connect(settings.redis_url), retention_seconds=settings.retention_seconds)
    start_periodic("reaper", Reaper(settings, store, failures).run)
