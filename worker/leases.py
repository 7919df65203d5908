"""Keeps what this worker owns, as long as its loop goes round, and brings back what others have lost.

Law: a loop that hangs renews nothing. The fence in each write decides who owns a task; leases only say when
somebody else may take it.
"""

import logging
from collections.abc import Callable, Mapping

import redis

from monitoring.worker import WorkerMetrics
from tokenmill.protocol.records import TaskPhase
from tokenmill.protocol.store.task_store import TaskStore
from worker.ownership import OwnedTasks, Ownership
from worker.watchdog import Watchdog

logger = logging.getLogger(__name__)

MAX_BEAT_SECONDS = 1.0


class Leases:
    """`turn` belongs to one thread.

    `announce` shows the worker to others, as it is at the moment. `on_lost` gets tasks that another took,
    `on_cancelled` those that a cancel ended. `phases` tells how tasks (task -> owner) stand in this
    worker, which is recorded for the case that it dies. `wait` pauses between two turns.
    """

    def __init__(
        self,
        store: TaskStore,
        owned_tasks: OwnedTasks,
        watchdog: Watchdog,
        metrics: WorkerMetrics,
        *,
        slug: str,
        lease_seconds: float,
        max_task_seconds: float,
        announce: Callable[[], None],
        on_lost: Callable[[Ownership], None],
        on_cancelled: Callable[[Ownership], None],
        phases: Callable[[Mapping[str, str]], Mapping[str, TaskPhase]],
        clock: Callable[[], float],
        wait: Callable[[float], None],
    ) -> None:
        self._store = store
        self._owned_tasks = owned_tasks
        self._watchdog = watchdog
        self._metrics = metrics
        self._slug = slug
        self._lease_seconds = lease_seconds
        self._max_task_seconds = max_task_seconds
        self._announce = announce
        self._on_lost = on_lost
        self._on_cancelled = on_cancelled
        self._standings = phases
        self._clock = clock
        self._wait = wait
        self._take_back_after = clock()
        # Since the last time that the reaper ran.
        self._failed_at: float | None = None

    def turn(self) -> None:
        """Renew, announce, reap, and wait for the next beat. Raises `RedisError`."""
        try:
            self._beat()
        except redis.RedisError:
            # Redis may have been away for all: the others get a lease's time to come back for theirs.
            self._failed_at = self._clock()
            self._take_back_after = self._failed_at + self._lease_seconds
            raise
        self._wait(min(MAX_BEAT_SECONDS, self._lease_seconds / 3))

    def _beat(self) -> None:
        if not self._watchdog.is_stalled:
            self._renew()
        self._announce()
        self._reap()

    def _renew(self) -> None:
        owners = self._owned_tasks.owners()
        if not owners:
            return
        renewed = self._store.renew(owners, self._lease_seconds, self._standings(owners))
        for task_ids, tell in ((renewed.lost, self._on_lost), (renewed.cancelled, self._on_cancelled)):
            for task_id in task_ids:
                tell(Ownership(task_id, owners[task_id]))

    def _reap(self) -> None:
        now = self._clock()
        reaped = self._store.reap(
            self._slug,
            max_task_seconds=self._max_task_seconds,
            reclaim_leases=now >= self._take_back_after,
            failed_seconds_ago=None if self._failed_at is None else now - self._failed_at,
        )
        self._failed_at = None
        if reaped.returned:
            logger.warning("back to the queue, their worker is gone: %s", ", ".join(reaped.returned))
            self._metrics.reclaimed(len(reaped.returned))
        if reaped.poisoned:
            logger.error("ended, as workers died of them: %s", ", ".join(reaped.poisoned))
            self._metrics.poisoned(len(reaped.poisoned))
        if reaped.lost:
            logger.error("ended, as Redis lost keys of them: %s", ", ".join(reaped.lost))
        for failure in reaped.failures:
            logger.error("reaper, %s: %s is set aside: %s", *failure)
            self._metrics.reap_failure(failure.duty)
