"""The state directory: its lock, and small files that survive a kill."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill.serve.child_processes import ProcessId
from tokenmill.serve.state_directory import SELF, AlreadyRunning, StateDirectory


@pytest.fixture
def state(tmp_path: Path) -> StateDirectory:
    directory = StateDirectory(tmp_path / "state")
    directory.create()
    return directory


def test_the_lock_is_exclusive(state: StateDirectory) -> None:
    descriptor = state.lock()
    with pytest.raises(AlreadyRunning):
        state.lock()

    os.close(descriptor)
    os.close(state.lock())


def test_a_living_child_holds_the_lock(state: StateDirectory) -> None:
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

    state.delete_record()
    assert state.address("api-url") is None
    assert state.processes() == {}


def test_addresses_are_private(state: StateDirectory) -> None:
    """A Redis URL may hold a password."""
    state.write_address("redis-url", "redis://:secret@h:1/0")

    assert (state.path / "redis-url").stat().st_mode & 0o077 == 0


def test_rights_of_others_are_removed_from_existing_files(state: StateDirectory) -> None:
    """Redis kept prompts and answers in files that every user of the machine could read."""
    log, part = state.redis_log, state.redis_data / "appendonlydir" / "appendonly.aof.1.incr.aof"
    part.parent.mkdir()
    for path in (log, part, state.lock_file, state.path / "redis-url", state.path / "processes.json"):
        path.write_text("x")
        path.chmod(0o644)
    for path in (state.path, state.redis_data, part.parent):
        path.chmod(0o755)

    state.create()

    everything = [state.path, *state.path.rglob("*")]
    assert len(everything) == 8
    assert [path for path in everything if path.stat().st_mode & 0o077] == []
    assert part.stat().st_mode & 0o700 == 0o600


def test_a_directory_with_another_purpose_keeps_its_rights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    state = StateDirectory(Path("."))
    state.create()
    os.close(state.lock())

    state.create()

    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert state.redis_data.stat().st_mode & 0o077 == 0
    assert state.lock_file.stat().st_mode & 0o077 == 0


def test_a_failed_write_keeps_the_old_file(state: StateDirectory) -> None:
    state.write_address("api-url", "http://127.0.0.1:8000")
    (state.path / ".api-url.new").symlink_to("/dev/full")

    with pytest.raises(OSError, match="api-url"):
        state.write_address("api-url", "http://127.0.0.1:9000")

    assert (state.path / "api-url").read_text() == "http://127.0.0.1:8000\n"


def test_processes_keep_their_order(state: StateDirectory) -> None:
    recorded = {name: ProcessId(number, f"b{number}") for number, name in enumerate(["c", "a", "b"])}
    state.write_processes(recorded)

    assert list(state.processes().items()) == list(recorded.items())


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1}', '{"a": {"pid": "x", "birth": ""}}'])
def test_an_unreadable_record_is_empty(state: StateDirectory, text: str) -> None:
    (state.path / "processes.json").write_text(text)

    assert state.processes() == {}
