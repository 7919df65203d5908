"""Renews the leases of owned tasks while the loop is alive, and reassigns tasks of workers that died.

Invariants: a stalled loop renews nothing. The owner check in every write decides who owns a task; a lease
only decides when another worker may take it.
"""

import time
from collections.abc import Callable
from typing import Protocol

import redis

from tokenmill.process.reaped_tasks import log_reaped
from tokenmill.protocol.store.task_store import TaskStore
from worker.context import WorkerContext
from worker.ownership import Ownership

MAX_BEAT_SECONDS = 1.0


class Announcer(Protocol):
    def announce(self) -> None:
        """Show the worker's state to others. Raises `RedisError`."""


class Leases:
    """`turn` belongs to one thread. `wait(seconds)` pauses between two turns."""

    def __init__(
        self,
        store: TaskStore,
        context: WorkerContext,
        registration: Announcer,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._context = context
        self._registration = registration
        self._wait = wait
        self._lease_seconds = context.timing.lease_seconds
        self._reclaim_after = context.clock()
        # Time of the last failure since the reaper last ran.
        self._failed_at: float | None = None

    def turn(self) -> None:
        """Renew, announce, reap, and wait for the next beat. Raises `RedisError`."""
        try:
            if not self._context.watchdog.is_stalled:
                self._renew()
            self._registration.announce()
            self._reap()
        except redis.RedisError:
            # Redis may be away for every worker: the others get the length of a lease to renew theirs.
            self._failed_at = self._context.clock()
            self._reclaim_after = self._failed_at + self._lease_seconds
            raise
        self._wait(min(MAX_BEAT_SECONDS, self._lease_seconds / 3))

    def _renew(self) -> None:
        owners = self._context.owned_tasks.owners()
        if not owners:
            return
        renewed = self._store.renew(owners, self._lease_seconds, self._context.phases(owners))
        for task_id in renewed.lost:
            self._context.drop_lost(Ownership(task_id, owners[task_id]))
        for task_id in renewed.cancelled:
            self._context.drop_cancelled(Ownership(task_id, owners[task_id]))

    def _reap(self) -> None:
        now, metrics = self._context.clock(), self._context.metrics
        reaped = self._store.reap(
            self._context.model.slug,
            max_task_seconds=self._context.timing.max_task_seconds,
            reclaim_leases=now >= self._reclaim_after,
            failed_seconds_ago=None if self._failed_at is None else now - self._failed_at,
        )
        self._failed_at = None
        log_reaped(reaped)
        if reaped.returned:
            metrics.reclaimed(len(reaped.returned))
        if reaped.poisoned:
            metrics.poisoned(len(reaped.poisoned))
        for failure in reaped.failures:
            metrics.reap_failure(failure.duty)
