"""Starts the processes of a service, keeps them up, and stops them in the opposite order.

Law: whatever way a run ends, nothing of it is left running and no task is lost. So the API stops first (no
new tasks), then the worker (it finishes or hands back), Redis last. It knows the rooms as processes only,
never as code, and reads no task.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby

from tokenmill.serve.processes import Child, ChildSpec, ProcessId, stop_orphan
from tokenmill.serve.restarts import RestartHistory
from tokenmill.serve.run_record import RunRecord
from tokenmill.serve.signals import StopSignals
from tokenmill.serve.state import SELF, AlreadyRunning, StateDirectory, check_room
from tokenmill.serve.stopping import how_it_ended, stop_together

_READY_POLL_SECONDS = 1.0
_ROOM_POLL_SECONDS = 1.0
_WRITE_AGAIN_SECONDS = 5.0
_ORPHAN_PATIENCE_SECONDS = 10.0
_LOCK_PATIENCE_SECONDS = 5.0
_LOCK_POLL_SECONDS = 0.05


class CannotServe(Exception):
    """The service cannot start or does not stay up; the message says why and what to do."""


class Unusable(CannotServe):
    """A child says that with these settings it never will."""


@dataclass
class Place:
    """A child's place: it outlives the processes that fill it. `due`: when the next one is started.

    `lacks_room`: the last look found none where the child writes.
    """

    spec: ChildSpec
    child: Child | None = None
    history: RestartHistory = field(default_factory=RestartHistory)
    due: float = 0.0
    lacks_room: bool = False


class Supervisor:
    """One run: children are started one by one, watched together, and stopped in the opposite order.

    `lock` is inherited by every child. `print_line(name, text)` shows a line of a child, or of the supervisor
    itself (`SELF`).
    """

    def __init__(
        self,
        state: StateDirectory,
        lock: int,
        signals: StopSignals,
        print_line: Callable[[str, str], None],
    ):
        self._state = state
        self._lock = lock
        self._signals = signals
        self._print = print_line
        self._places: list[Place] = []
        self._was_ready = False
        self.record = RunRecord(state, print_line)

    def start(self, spec: ChildSpec) -> Child:
        """Start a child, and keep it up from now on. Raises `CannotServe`."""
        if why := _lacks_room(spec):
            raise CannotServe(why)
        try:
            child = Child(spec, (self._lock,), self._print)
        except OSError as error:
            raise CannotServe(f"the {spec.name} cannot be started: {error.strerror}") from error
        self._places.append(Place(spec, child))
        self._record_processes()
        return child

    def watch(self, is_ready: Callable[[], bool], on_ready: Callable[[], None]) -> None:
        """Keep all children up until `StopRequested`.

        Raises `CannotServe` if one does not stay up, `Unusable` if it ends with a code that is final. Once
        the service was ready no code is final: what it was started with has worked.

        `on_ready` is called once, when `is_ready` says so for the first time.
        """
        while True:
            for place in self._places:
                self._tend(place)
            if not self._was_ready and is_ready():
                self._was_ready = True
                on_ready()
            self.record.retry()
            self._signals.pause(self._idle_seconds())

    def stop(self) -> None:
        """Stop every child, the last started first and those of a stage together, and forget the run."""
        for _, places in groupby(reversed(self._places), lambda each: each.spec.stage or each.spec.name):
            stop_together([each.child for each in places if each.child], self._signals, self._print)
        self._state.forget_run()

    def _fill(self, place: Place) -> None:
        """Start the next child of a place, or say why not and make it due again."""
        if why := _lacks_room(place.spec):
            self._await_room(place, why)
            return
        if place.lacks_room:
            # What died for want of room died of nothing else.
            place.lacks_room, place.history = False, RestartHistory()
        try:
            place.child = Child(place.spec, (self._lock,), self._print)
        except OSError as error:
            place.history = place.history.after_death(0.0, was_ready=self._was_ready)
            place.due = time.monotonic() + place.history.delay
            why = f"the {place.spec.name} cannot be started: {error.strerror}"
            self._print(SELF, f"{why}; trying again in {place.history.delay:g} s")
        else:
            self._record_processes()

    def _await_room(self, place: Place, why: str) -> None:
        place.due = time.monotonic() + _ROOM_POLL_SECONDS
        if not place.lacks_room:
            self._print(SELF, f"{why}; the {place.spec.name} is started again as soon as it can be written")
        place.lacks_room = True

    def _record_processes(self) -> None:
        living = {each.spec.name: each.child.id for each in reversed(self._places) if each.child}
        self.record.put_processes({SELF: ProcessId.own(), **living})

    def _tend(self, place: Place) -> None:
        """Bury a child that died, or start the next one when it is due."""
        if place.child is None:
            if time.monotonic() >= place.due:
                self._fill(place)
        elif place.child.returncode is not None:
            self._bury(place, place.child)

    def _bury(self, place: Place, child: Child) -> None:
        child.finish_output()
        place.child = None
        place.history = place.history.after_death(child.lived, was_ready=self._was_ready)
        place.due = time.monotonic() + place.history.delay
        name, end = place.spec.name, how_it_ended(child.returncode)
        if not self._was_ready:
            if child.returncode in place.spec.final_codes:
                raise Unusable(f"the {name} {end}{_last_words(child)}")
            if place.history.is_hopeless:
                raise CannotServe(f"the {name} {end}{_last_words(child)}")
        often = f" {place.history.early_deaths} times in a row" if place.history.is_hopeless else ""
        self._print(SELF, f"the {name} {end}{often}; starting it again in {place.history.delay:g} s")

    def _idle_seconds(self) -> float:
        """Until something is to be done without a signal."""
        waits = [place.due - time.monotonic() for place in self._places if place.child is None]
        if not self.record.is_written:
            waits.append(_WRITE_AGAIN_SECONDS)
        return min([*waits, _READY_POLL_SECONDS if not self._was_ready else 60.0])


def take_over(state: StateDirectory, print_line: Callable[[str, str], None]) -> int:
    """Lock the state directory, once what a killed run left behind is gone. Raises `CannotServe`."""
    try:
        state.create()
        return state.lock()
    except AlreadyRunning:
        pass
    except OSError as error:
        raise CannotServe(
            f"the state directory {state.path} cannot be used: {error.strerror}: {error.filename}; choose "
            "another with --state-dir or TOKENMILL_STATE_DIR"
        ) from error
    left = state.processes()
    owner = left.pop(SELF, None)
    if owner is None or owner.is_alive():
        raise CannotServe(_already_running(state, owner))
    for name, process in left.items():
        if process.is_alive():
            print_line(SELF, f"stopping the {name} (pid {process.pid}) of an earlier run that was killed")
            stop_orphan(process, _ORPHAN_PATIENCE_SECONDS)
    return _lock_patiently(state)


def _lock_patiently(state: StateDirectory) -> int:
    """A process that has died holds its files for a moment longer, the more so if it had many threads."""
    deadline = time.monotonic() + _LOCK_PATIENCE_SECONDS
    while True:
        try:
            return state.lock()
        except AlreadyRunning:
            if time.monotonic() > deadline:
                raise CannotServe(_already_running(state, None)) from None
        time.sleep(_LOCK_POLL_SECONDS)


def _already_running(state: StateDirectory, owner: ProcessId | None) -> str:
    who = f"a tokenmill serve (pid {owner.pid})" if owner else "another process"
    where = f" at {address}" if (address := state.address("api-url")) else ""
    return (
        f"{who} already uses {state.path}{where}; stop it first, or give this one a directory of its own "
        "with --state-dir or TOKENMILL_STATE_DIR"
    )


def _lacks_room(spec: ChildSpec) -> str:
    """Why the child could not write, "" if it could."""
    if spec.room is None:
        return ""
    try:
        check_room(spec.room)
    except OSError as error:
        return (
            f"{spec.room} cannot be written: {error.strerror}; make room there, or choose another directory "
            "with TOKENMILL_STATE_DIR"
        )
    return ""


def _last_words(child: Child) -> str:
    """At the end of everything, as the lines of the others that stop hide them."""
    if child.spec.log:
        return f"; its lines are in {child.spec.log}"
    return f"; its last line: {child.last_line}" if child.last_line else "; it said nothing"
