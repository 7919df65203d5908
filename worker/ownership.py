"""The tasks that this worker believes it owns. Redis decides: its scripts check the owner at every write.

Invariant: a task is owned from its claim until its end is stored, it is handed back, or it is lost.
"""

import threading
from typing import NamedTuple


class Ownership(NamedTuple):
    """One attempt at one task. Each claim makes a new `owner`."""

    task_id: str
    owner: str

    @property
    def request_id(self) -> str:
        """The engine's id of this attempt. A later attempt at the task is another request."""
        return f"{self.task_id}:{self.owner}"


class OwnedTasks:
    """Shared by all threads. `wake` is set when a task is dropped, so that another can be claimed."""

    def __init__(self, wake: threading.Event) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._owners: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, ownership: Ownership) -> bool:
        return self._owners.get(ownership.task_id) == ownership.owner

    def add(self, ownership: Ownership) -> None:
        """Own a task. Replaces an earlier attempt at it."""
        with self._lock:
            self._owners[ownership.task_id] = ownership.owner

    def drop(self, ownership: Ownership) -> bool:
        """Return False if it is not owned (any more)."""
        with self._lock:
            if ownership not in self:
                return False
            del self._owners[ownership.task_id]
        self._wake.set()
        return True

    def find(self, task_id: str) -> Ownership | None:
        owner = self._owners.get(task_id)
        return Ownership(task_id, owner) if owner else None

    def owners(self) -> dict[str, str]:
        """A copy: task -> owner."""
        with self._lock:
            return dict(self._owners)
