"""A new supervisor refuses to start beside a running one, and stops what a killed one left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tokenmill.serve.children import Lines
from tokenmill.serve import take_over as module
from tokenmill.serve.child_processes import ProcessId
from tokenmill.serve.errors import CannotServe
from tokenmill.serve.state_directory import SELF, AlreadyRunning, StateDirectory
from tokenmill.serve.take_over import take_over


def test_a_directory_in_use_is_refused(tmp_path: Path) -> None:
    state, lines = StateDirectory(tmp_path / "state"), Lines()
    lock = take_over(state, lines)
    state.write_processes({SELF: ProcessId.own()})
    state.write_address("api-url", "http://127.0.0.1:8000")

    with pytest.raises(CannotServe) as raised:
        take_over(state, lines)

    os.close(lock)
    message = str(raised.value)
    assert f"a tokenmill serve (pid {os.getpid()}) already uses" in message
    assert "at http://127.0.0.1:8000" in message
    assert "TOKENMILL_STATE_DIR" in message


def test_a_directory_that_cannot_be_used_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(CannotServe, match="cannot be used: Not a directory"):
        take_over(StateDirectory(tmp_path / "file" / "state"), Lines())


def test_orphans_of_a_killed_supervisor_are_stopped(tmp_path: Path) -> None:
    state, lines = StateDirectory(tmp_path / "state"), Lines()
    lock = take_over(state, lines)
    orphans = [
        subprocess.Popen(
            [sys.executable, "-c", "input()"], stdin=subprocess.PIPE, process_group=0, pass_fds=[lock]
        )
        for _ in range(2)
    ]
    os.close(lock)
    ids = [ProcessId.of(orphan.pid) for orphan in orphans]
    state.write_processes({SELF: ProcessId(os.getpid(), "killed"), "api": ids[0], "redis": ids[1]})

    os.close(take_over(state, lines))

    assert [orphan.wait() for orphan in orphans] == [-signal.SIGTERM] * 2
    assert [text.split(" (pid")[0] for _, text in lines.seen] == ["stopping the api", "stopping the redis"]
    for orphan in orphans:
        assert orphan.stdin is not None
        orphan.stdin.close()


def test_the_lock_of_a_dead_process_may_be_released_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux lists an flock for a tenth of a second after its last holder, of many threads, has died."""
    state, lines = StateDirectory(tmp_path / "state"), Lines()
    held, original, failed = take_over(state, lines), StateDirectory.lock, []
    state.write_processes({SELF: ProcessId(os.getpid(), "killed")})

    def lock(self: StateDirectory) -> int:
        try:
            return original(self)
        except AlreadyRunning:
            failed.append(self)
            if len(failed) == 3:
                os.close(held)
            raise

    monkeypatch.setattr(StateDirectory, "lock", lock)
    os.close(take_over(state, lines))

    assert len(failed) == 3


def test_an_unrecorded_child_of_a_killed_supervisor_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a Redis server: a second one over the same files would destroy them."""
    monkeypatch.setattr(module, "_LOCK_TIMEOUT_SECONDS", 0.1)
    state, lines = StateDirectory(tmp_path / "state"), Lines()
    lock = take_over(state, lines)
    state.write_processes({SELF: ProcessId(os.getpid(), "killed")})

    with pytest.raises(CannotServe, match="another process already uses"):
        take_over(state, lines)

    os.close(lock)
