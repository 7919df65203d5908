"""Isolated retries of suspects: tasks that an earlier worker may have died of run alone, one after another.

Invariant: from before the retry is recorded until a token or the end of the task is stored, the suspect is
the only task that this worker touches, so that it is to blame if the worker dies. The loop quiesces before
the record is written, and no other task is claimed or prepared.
"""

import threading
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from enum import Enum, auto

from tokenmill.protocol.records import Claimed, TaskPhase
from worker.inbox import Inbox, PreparedTask, Quiesce, Resume, RetryIsolated
from worker.ownership import Ownership


class Stage(Enum):
    REQUESTED = auto()
    """The loop is asked to quiesce."""
    QUIESCED = auto()
    """The loop steps no request. The suspect may be recorded as alone."""
    RUNNING = auto()
    """The loop has the suspect."""


# A retry stays quiesced if it could not be recorded.
_REACHED_FROM = {Stage.QUIESCED: (Stage.REQUESTED, Stage.QUIESCED), Stage.RUNNING: (Stage.QUIESCED,)}


@dataclass(frozen=True, slots=True)
class Retry:
    """`heard`: set by the loop once it steps no request."""

    ownership: Ownership
    heard: threading.Event
    stage: Stage = Stage.REQUESTED


class IsolatedRetries:
    """The suspects that wait for their retry, and the retry in progress.

    `add`, `next_suspect`, `quiesce` and `begin` belong to the intake's thread; the other methods may be
    called from any. `wake` is set when a retry ends. `clock`: monotonic seconds.
    """

    def __init__(self, inbox: Inbox, wake: threading.Event, clock: Callable[[], float]) -> None:
        self._inbox = inbox
        self._wake = wake
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[Ownership, tuple[Claimed, float]] = {}
        self._retry: Retry | None = None
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Suspects whose retry has not begun."""
        return len(self._waiting)

    @property
    def is_pending(self) -> bool:
        """Whether a retry is in progress, from the request to quiesce on."""
        return self._retry is not None

    @property
    def is_running(self) -> bool:
        """Whether the loop has a suspect."""
        retry = self._retry
        return retry is not None and retry.stage is Stage.RUNNING

    def phases(self, owners: Mapping[str, str], idle_ids: Set[str]) -> dict[str, TaskPhase]:
        """The phase of each task of `owners` (task -> owner). `idle_ids`: requests that only wait."""
        with self._lock:
            return {
                task_id: self._phase(Ownership(task_id, owner), idle_ids) for task_id, owner in owners.items()
            }

    def _phase(self, ownership: Ownership, idle_ids: Set[str]) -> TaskPhase:
        retry = self._retry
        if retry is not None and retry.stage is not Stage.REQUESTED:
            return "alone" if ownership == retry.ownership else "untouched"
        if ownership in self._waiting:
            return "untouched"
        return "waiting" if ownership.request_id in idle_ids else "seated"

    def add(self, task: Claimed) -> None:
        with self._lock:
            self._waiting[Ownership(task.task_id, task.owner)] = (task, self._clock())

    def next_suspect(self) -> Claimed | None:
        """The suspect to quiesce for and to begin. None while one runs."""
        with self._lock:
            if self.is_running:
                return None
            return next((task for task, _ in self._waiting.values()), None)

    def quiesce(self, ownership: Ownership, seconds: float) -> bool:
        """Ask the loop to step no request, and wait up to `seconds` for it. Call again until it returns True.

        From then on `phases` is to be recorded, and no task may be claimed or prepared.
        """
        with self._lock:
            if self._is_closed or ownership not in self._waiting:
                return False
            if self._retry is None:
                self._retry = Retry(ownership, threading.Event())
                self._inbox.put(Quiesce(ownership, self._retry.heard))
            heard = self._retry.heard
        if not heard.wait(seconds):
            return False
        with self._lock:
            return self._reach(ownership, Stage.QUIESCED)

    def begin(self, ownership: Ownership, prepare: Callable[[float], PreparedTask | None]) -> bool:
        """Let the loop prepare the recorded suspect and step it alone. Returns False if it is gone.

        `prepare` gets the seconds since the claim, and returns None if the task ends before it is prepared.
        """
        with self._lock:
            if not self._reach(ownership, Stage.RUNNING):
                return False
            _, claimed_at = self._waiting.pop(ownership)
            self._inbox.put(RetryIsolated(ownership, lambda: prepare(self._clock() - claimed_at)))
            return True

    def close(self) -> None:
        """Begin no more retries. The loop resumes unless a retry runs."""
        with self._lock:
            self._is_closed = True
            if self._retry is not None and self._retry.stage is not Stage.RUNNING:
                self._end(self._retry)

    def finish(self, ownership: Ownership) -> None:
        """A token or the end of the task is stored, or the task is dropped. Called for every task."""
        retry = self._retry
        if ownership not in self._waiting and (retry is None or ownership != retry.ownership):
            return
        with self._lock:
            self._waiting.pop(ownership, None)
            if self._retry is not None and ownership == self._retry.ownership:
                self._end(self._retry)

    def _reach(self, ownership: Ownership, stage: Stage) -> bool:
        """Advance the retry to `stage`. Returns False if it is another's or at the wrong stage."""
        retry = self._retry
        if retry is None or retry.ownership != ownership or retry.stage not in _REACHED_FROM[stage]:
            return False
        self._retry = replace(retry, stage=stage)
        return True

    def _end(self, retry: Retry) -> None:
        self._inbox.put(Resume(retry.ownership))
        self._retry = None
        self._wake.set()
