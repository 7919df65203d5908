"""Tasks that an earlier worker may have died of: each is tried alone, one after the other.

Law: from before its trial is recorded until a token or an end of it is stored, a task is the only one that
this worker touches, so that whatever kills the worker meanwhile is this task's doing: the loop steps nobody
before the record is made, and nobody else is claimed or prepared. Knows neither Redis nor the engine.
"""

import threading
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from enum import Enum, auto

from tokenmill.protocol.records import Claimed, TaskPhase
from worker.inbox import Inbox, PreparedTask, Quiesce, Resume, RetryIsolated
from worker.ownership import Ownership


class Stage(Enum):
    """How far a turn has come."""

    ASKED = auto()
    """The loop is to step nobody."""
    QUIET = auto()
    """It steps nobody: the one whose turn it is may be recorded as alone."""
    BEGUN = auto()
    """It has the trial."""


REACHED_FROM = {Stage.QUIET: (Stage.ASKED, Stage.QUIET), Stage.BEGUN: (Stage.QUIET,)}
"""A turn stays quiet where it could not be recorded."""


@dataclass(frozen=True, slots=True)
class Turn:
    """`heard`: set by the loop once it steps nobody."""

    ownership: Ownership
    heard: threading.Event
    stage: Stage = Stage.ASKED


class IsolatedRetries:
    """Suspects that wait for their turn, and the one whose turn it is.

    `add`, `next`, `quiesce` and `begin` belong to the thread that claims and prepares; the others may be
    called from any. `wake` is set when a trial is over. `clock`: seconds that never go back.
    """

    def __init__(self, inbox: Inbox, wake: threading.Event, clock: Callable[[], float]) -> None:
        self._inbox = inbox
        self._wake = wake
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[Ownership, tuple[Claimed, float]] = {}
        self._turn: Turn | None = None
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Suspects whose turn has not come."""
        return len(self._waiting)

    @property
    def is_pending(self) -> bool:
        """The loop was asked to be silent for one; or it is tried already."""
        return self._turn is not None

    @property
    def is_on(self) -> bool:
        """One is being tried."""
        turn = self._turn
        return turn is not None and turn.stage is Stage.BEGUN

    def phases(self, owners: Mapping[str, str], in_line: Set[str]) -> dict[str, TaskPhase]:
        """How each of `owners` (task -> owner) stands in this worker; `in_line`: requests that wait there."""
        with self._lock:
            return {held: self._phase(Ownership(held, owners[held]), in_line) for held in owners}

    def _phase(self, ownership: Ownership, in_line: Set[str]) -> TaskPhase:
        turn = self._turn
        if turn is not None and turn.stage is not Stage.ASKED:
            return "alone" if ownership == turn.ownership else "untouched"
        if ownership in self._waiting:
            return "untouched"
        return "waiting" if ownership.request_id in in_line else "seated"

    def add(self, task: Claimed) -> None:
        with self._lock:
            self._waiting[Ownership(task.task_id, task.owner)] = (task, self._clock())

    def next(self) -> Claimed | None:
        """Whose turn it is, or will be next."""
        with self._lock:
            return next((task for task, _ in self._waiting.values()), None)

    def quiesce(self, ownership: Ownership, seconds: float) -> bool:
        """Let the loop step nobody. False: it does not know yet; ask again. From then on it is to be recorded
        as `phases` says, and nothing else may be claimed or prepared.
        """
        with self._lock:
            if self._is_closed or ownership not in self._waiting:
                return False
            if self._turn is None:
                self._turn = Turn(ownership, threading.Event())
                self._inbox.put(Quiesce(ownership, self._turn.heard))
            heard = self._turn.heard
        if not heard.wait(seconds):
            return False
        with self._lock:
            return self._reach(ownership, Stage.QUIET)

    def begin(self, ownership: Ownership, prepare: Callable[[float], PreparedTask | None]) -> bool:
        """It is recorded: the loop prepares it and steps it alone. False if it is over before that.

        `prepare` gets the seconds since its claim; None: it ended before it was prepared.
        """
        with self._lock:
            if not self._reach(ownership, Stage.BEGUN):
                return False
            _, claimed_at = self._waiting.pop(ownership)
            self._inbox.put(RetryIsolated(ownership, lambda: prepare(self._clock() - claimed_at)))
            return True

    def close(self) -> None:
        """No more trials: the loop is not to wait for one that will not come."""
        with self._lock:
            self._is_closed = True
            # One that is recorded, but not begun, is not begun any more: its turn may have failed.
            if self._turn is not None and self._turn.stage is not Stage.BEGUN:
                self._end(self._turn)

    def finish(self, ownership: Ownership) -> None:
        """A token or an end of it is stored, or it is not ours any more. For every task, suspect or not."""
        turn = self._turn
        if ownership not in self._waiting and (turn is None or ownership != turn.ownership):
            return
        with self._lock:
            self._waiting.pop(ownership, None)
            if self._turn is not None and ownership == self._turn.ownership:
                self._end(self._turn)

    def _reach(self, ownership: Ownership, stage: Stage) -> bool:
        """The turn comes to `stage`. False, and no change, where it is not its turn, or it was not so far."""
        turn = self._turn
        if turn is None or turn.ownership != ownership or turn.stage not in REACHED_FROM[stage]:
            return False
        self._turn = replace(turn, stage=stage)
        return True

    def _end(self, turn: Turn) -> None:
        self._inbox.put(Resume(turn.ownership))
        self._turn = None
        self._wake.set()
