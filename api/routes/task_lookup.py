"""Finds the task that a URL names, or says why there is none."""

import time
from collections.abc import Callable
from typing import TypeVar

from api.authentication import current_tenant
from api.problems import Problem
from tokenmill.protocol import naming
from tokenmill.protocol.snapshots import Reading, TaskSnapshot
from tokenmill.protocol.store.script_errors import LOST_ERROR
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.declarations import ApiSettings

Found = TypeVar("Found")
_NOT_FOUND = "there is no such task"
_PERHAPS_LOST = (
    f"{_NOT_FOUND}; if it was accepted and not deleted, Redis has lost it: see the warnings of /readyz"
)


class TaskLookup:
    """Looks up tasks for the tenant of the current call.

    Every method raises `Problem` (404 or 410). The task of another tenant is reported as not found.
    """

    def __init__(self, settings: ApiSettings, store: TaskStore) -> None:
        self._settings = settings
        self._store = store

    def inspect(self, task_id: str) -> TaskSnapshot:
        return self._find(self._store.inspect, task_id)

    def read(self, task_id: str) -> Reading:
        """The task with its log, of the same moment."""
        return self._find(self._store.read, task_id)

    def _find(self, find: Callable[[str, str | None], Found | None], task_id: str) -> Found:
        if not naming.TASK_ID.fullmatch(task_id):
            raise _not_found(_NOT_FOUND)
        tenant = current_tenant() if self._settings.keyring else None
        found = find(task_id, tenant)
        if found is None:
            raise self._why_missing(task_id, tenant)
        return found

    def _why_missing(self, task_id: str, tenant: str | None) -> Problem:
        age = time.time() - naming.task_id_time(task_id)
        if self._settings.retention_seconds < age <= time.time() - naming.EARLIEST_TASK_TIME:
            return Problem(410, "task_expired", "this task ended too long ago and is no longer kept")
        if self._store.is_lost(task_id, tenant):
            return Problem(404, "lost", LOST_ERROR.message, param="task_id")
        is_recent = abs(age) <= self._settings.retention_seconds
        return _not_found(_PERHAPS_LOST if is_recent else _NOT_FOUND)


def _not_found(detail: str) -> Problem:
    return Problem(404, "task_not_found", detail, param="task_id")
