"""Locks the state directory for a new run, after stopping what a killed run left behind."""

import time
from collections.abc import Callable

from tokenmill.serve.child_processes import ProcessId, stop_orphan
from tokenmill.serve.errors import CannotServe
from tokenmill.serve.state_directory import SELF, AlreadyRunning, StateDirectory

_ORPHAN_TIMEOUT_SECONDS = 10.0
_LOCK_TIMEOUT_SECONDS = 5.0
_LOCK_POLL_SECONDS = 0.05


def take_over(state: StateDirectory, print_line: Callable[[str, str], None]) -> int:
    """Return the descriptor of the lock. Raises `CannotServe`."""
    try:
        state.create()
        return state.lock()
    except AlreadyRunning:
        pass
    except OSError as error:
        raise CannotServe(
            f"the state directory {state.path} cannot be used: {error.strerror}: {error.filename}; choose"
            " another with --state-dir or TOKENMILL_STATE_DIR"
        ) from error
    recorded = state.processes()
    owner = recorded.pop(SELF, None)
    if owner is None or owner.is_alive():
        raise CannotServe(_already_running(state, owner))
    for name, process in recorded.items():
        if process.is_alive():
            print_line(SELF, f"stopping the {name} (pid {process.pid}) of an earlier run that was killed")
            stop_orphan(process, _ORPHAN_TIMEOUT_SECONDS)
    return _wait_for_lock(state)


def _wait_for_lock(state: StateDirectory) -> int:
    """A process that has died keeps its locks for a moment, longer if it had many threads."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_SECONDS
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
        f"{who} already uses {state.path}{where}; stop it first, or give this one a directory of its own"
        " with --state-dir or TOKENMILL_STATE_DIR"
    )
