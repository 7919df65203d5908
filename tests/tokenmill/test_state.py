"""The state directory: one user at a time, and small files that survive a kill."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill.processes import ProcessId
from tokenmill.state import SELF, AlreadyRunning, StateDirectory


@pytest.fixture
def state(tmp_path: Path) -> StateDirectory:
    directory = StateDirectory(tmp_path / "state")
    directory.create()
    return directory


def test_only_one_holds_the_lock(state: StateDirectory) -> None:
    descriptor = state.lock()
    with pytest.raises(AlreadyRunning):
        state.lock()

    os.close(descriptor)
    os.close(state.lock())


def test_the_lock_is_held_as_long_as_any_child_lives(state: StateDirectory) -> None:
    """The supervisor may be killed: its children still use the directory."""
    descriptor = state.lock()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(descriptor,))
    os.close(descriptor)

    with pytest.raises(AlreadyRunning):
        state.lock()

    child.send_signal(signal.SIGKILL)
    child.wait()
    assert child.stdin is not None
    child.stdin.close()
    os.close(state.lock())


def test_addresses_are_those_of_a_running_service(state: StateDirectory) -> None:
    state.write_address("api-url", "http://127.0.0.1:8000")
    assert state.address("api-url") is None

    state.write_processes({SELF: ProcessId(os.getpid(), "an earlier time")})
    assert state.address("api-url") is None

    state.write_processes({SELF: ProcessId.own()})
    assert state.address("api-url") == "http://127.0.0.1:8000"

    state.forget_run()
    assert state.address("api-url") is None
    assert state.processes() == {}


def test_addresses_are_for_their_owner_alone(state: StateDirectory) -> None:
    """A Redis URL may hold a password."""
    state.write_address("redis-url", "redis://:secret@h:1/0")

    assert (state.path / "redis-url").stat().st_mode & 0o077 == 0


def test_processes_keep_their_order(state: StateDirectory) -> None:
    recorded = {name: ProcessId(number, f"b{number}") for number, name in enumerate(["c", "a", "b"])}
    state.write_processes(recorded)

    assert list(state.processes().items()) == list(recorded.items())


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1}', '{"a": {"pid": "x", "birth": ""}}'])
def test_an_illegible_record_is_none(state: StateDirectory, text: str) -> None:
    (state.path / "processes.json").write_text(text)

    assert state.processes() == {}
