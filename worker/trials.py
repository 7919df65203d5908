"""Tasks that an earlier worker may have died of: each is tried alone, one after the other.

Law: from before its trial is recorded until a token or an end of it is stored, a task is the only one that
this worker touches, so that whatever kills the worker meanwhile is this task's doing: the loop steps nobody
before the record is made, and nobody else is claimed or prepared. Knows neither Redis nor the engine.
"""

import threading
from collections.abc import Callable, Mapping, Set

from worker.inbox import Arrival, Hush, Inbox, Resume, Try
from worker.ownership import Ownership
from worker.protocol.records import Claimed, Standing


class Trials:
    """Suspects that wait for their turn, and the one whose turn it is.

    `add`, `next`, `quieten` and `begin` belong to the thread that claims and prepares; the others may be
    called from any. `wake` is set when a trial is over. `clock`: seconds that never go back.
    """

    def __init__(self, inbox: Inbox, wake: threading.Event, clock: Callable[[], float]) -> None:
        self._inbox = inbox
        self._wake = wake
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[Ownership, tuple[Claimed, float]] = {}
        self._current: Ownership | None = None
        self._is_quiet = False
        self._has_begun = False
        self._is_closed = False
        self._heard = threading.Event()

    @property
    def num_waiting(self) -> int:
        """Suspects whose turn has not come."""
        return len(self._waiting)

    @property
    def is_pending(self) -> bool:
        """The loop was asked to be silent for one; or it is tried already."""
        return self._current is not None

    @property
    def is_on(self) -> bool:
        """One is being tried."""
        return self._has_begun

    def standings(self, owners: Mapping[str, str], in_line: Set[str]) -> dict[str, Standing]:
        """How each of `owners` (task -> owner) stands in this worker; `in_line`: requests that wait there."""
        with self._lock:
            return {held: self._standing(Ownership(held, owners[held]), in_line) for held in owners}

    def _standing(self, ownership: Ownership, in_line: Set[str]) -> Standing:
        if self._is_quiet or ownership in self._waiting:
            return "alone" if self._is_quiet and ownership == self._current else "untouched"
        return "waiting" if ownership.request_id in in_line else "seated"

    def add(self, task: Claimed) -> None:
        with self._lock:
            self._waiting[Ownership(task.task_id, task.owner)] = (task, self._clock())

    def next(self) -> Claimed | None:
        """Whose turn it is, or will be next."""
        with self._lock:
            return next((task for task, _ in self._waiting.values()), None)

    def quieten(self, ownership: Ownership, seconds: float) -> bool:
        """Let the loop step nobody. False: it does not know yet; ask again. From then on it is to be recorded
        as `standings` says, and nothing else may be claimed or prepared.
        """
        with self._lock:
            if self._is_closed or ownership not in self._waiting:
                return False
            if self._current is None:
                self._current, self._heard = ownership, threading.Event()
                self._inbox.put(Hush(ownership, self._heard))
            heard = self._heard
        if not heard.wait(seconds):
            return False
        with self._lock:
            self._is_quiet = self._current == ownership
            return self._is_quiet

    def begin(self, ownership: Ownership, prepare: Callable[[float], Arrival | None]) -> bool:
        """It is recorded: the loop prepares it and steps it alone. False if it is over before that.

        `prepare` gets the seconds since its claim; None: it ended without an arrival.
        """
        with self._lock:
            if self._current != ownership:
                return False
            _, claimed_at = self._waiting.pop(ownership)
            self._has_begun = True
            self._inbox.put(Try(ownership, lambda: prepare(self._clock() - claimed_at)))
            return True

    def close(self) -> None:
        """No more trials: the loop is not to wait for one that will not come."""
        with self._lock:
            self._is_closed = True
            # One that is recorded, but not begun, is not begun any more: its turn may have failed.
            if self._current is not None and not self._has_begun:
                self._end()

    def finish(self, ownership: Ownership) -> None:
        """A token or an end of it is stored, or it is not ours any more. For every task, suspect or not."""
        if ownership != self._current and ownership not in self._waiting:
            return
        with self._lock:
            self._waiting.pop(ownership, None)
            if ownership == self._current:
                self._end()

    def _end(self) -> None:
        assert self._current is not None
        self._inbox.put(Resume(self._current))
        self._current, self._is_quiet, self._has_begun = None, False, False
        self._wake.set()
