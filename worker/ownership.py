"""Which tasks this worker owns, as it believes. The truth is in Redis, whose scripts check every write.

Law: a task is held from its claim until its end is stored, it is handed back, or it turns out to be lost.
"""

import threading
from typing import NamedTuple


class Ownership(NamedTuple):
    """One attempt at one task. `owner` is made by the claim and never used again."""

    task_id: str
    owner: str

    @property
    def request_id(self) -> str:
        """The engine's name for this attempt: a task that comes back is a new request, never a mix-up."""
        return f"{self.task_id}:{self.owner}"


class OwnedTasks:
    """The owned tasks, shared by all threads. `wake` is set when one goes, so that another may come."""

    def __init__(self, wake: threading.Event) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._owners: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def __contains__(self, ownership: Ownership) -> bool:
        return self._owners.get(ownership.task_id) == ownership.owner

    def take(self, ownership: Ownership) -> Ownership | None:
        """Gives the ownership that this one replaces: the task was lost, and nobody had noticed."""
        with self._lock:
            old_owner = self._owners.get(ownership.task_id)
            self._owners[ownership.task_id] = ownership.owner
        return Ownership(ownership.task_id, old_owner) if old_owner else None

    def drop(self, ownership: Ownership) -> bool:
        """False, and nothing changes, if it is not held (any more)."""
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
