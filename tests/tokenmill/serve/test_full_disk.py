"""Writes that fail end nothing: the supervisor goes on, and Redis comes back as soon as there is room.

redis#1522: with `appendfsync always` a server ends itself when it cannot write its append-only file.
"""

import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live_service import wait_for
from tests.tokenmill.cli.acknowledged import check_kept, push_until_it_ends
from tests.tokenmill.serve.served import WITH_FAKE_ROOMS, Served
from tests.tokenmill.serve.test_processes import SLEEPER, Lines
from tests.tokenmill.serve.test_supervisor import POLITE, Stage, ask_to_stop, stage
from tokenmill.cli.console import LinePrinter
from tokenmill.serve import restarts, supervisor
from tokenmill.serve.processes import Child, ChildSpec
from tokenmill.serve.run_record import RunRecord
from tokenmill.serve.signals import StopRequested
from tokenmill.serve.state import SELF, StateDirectory
from tokenmill.serve.supervisor import CannotServe

__all__ = ["stage"]


class Blocked:
    """Writes to a file of the state directory that fail: what they are made through is a full device."""

    def __init__(self, state: StateDirectory) -> None:
        self._state = state
        state.create()

    def records(self, name: str) -> None:
        (self._state.path / f".{name}.new").mkdir()

    def free_records(self, name: str) -> None:
        (self._state.path / f".{name}.new").rmdir()

    def room(self) -> None:
        (self._state.redis_data / ".room").symlink_to("/dev/full")


def test_what_could_not_be_recorded_is_recorded_later(tmp_path: Path) -> None:
    state, lines = StateDirectory(tmp_path / "state"), Lines()
    blocked = Blocked(state)
    blocked.records("api-url")
    blocked.records("redis-url")
    record = RunRecord(state, lines)

    record.put_address("api-url", "http://127.0.0.1:1")
    record.put_address("redis-url", "unix:///s")
    record.retry()
    assert not record.is_written
    assert len(lines.seen) == 1
    assert f"{state.path} cannot be written: " in lines.seen[0][1]

    blocked.free_records("api-url")
    blocked.free_records("redis-url")
    record.retry()
    assert record.is_written
    assert (state.path / "api-url").read_text() == "http://127.0.0.1:1\n"
    assert (state.path / "redis-url").read_text() == "unix:///s\n"


def test_a_restart_that_cannot_be_recorded_happens(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "_FIRST_SECONDS", 0.01)
    monkeypatch.setattr(supervisor, "_WRITE_AGAIN_SECONDS", 0.01)
    stage.start("worker", SLEEPER)
    stage.lines.wait_for("up")
    first = stage.state.processes()["worker"]
    Blocked(stage.state).records("processes.json")
    os.kill(first.pid, signal.SIGKILL)

    def is_back() -> bool:
        if sum(text == "up" for _, text in stage.lines.seen) == 2 and not stage.supervisor.record.is_written:
            Blocked(stage.state).free_records("processes.json")
        return stage.supervisor.record.is_written and stage.state.processes()["worker"] != first

    with pytest.raises(StopRequested):
        stage.supervisor.watch(is_back, ask_to_stop)

    assert stage.state.processes()["worker"].is_alive()


def test_a_child_that_needs_room_waits_for_it(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it died for want of it: the service is not given up."""
    monkeypatch.setattr(restarts, "_FIRST_SECONDS", 0.01)
    monkeypatch.setattr(supervisor, "_ROOM_POLL_SECONDS", 0.01)
    monkeypatch.setattr(supervisor, "_READY_POLL_SECONDS", 0.01)
    stage.start("redis", SLEEPER, room=stage.state.redis_data)
    stage.lines.wait_for("up")
    probes: list[Path] = []

    def check_room(directory: Path) -> None:
        probes.append(directory)
        if len(probes) < 5:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(supervisor, "check_room", check_room)
    os.kill(stage.state.processes()["redis"].pid, signal.SIGKILL)

    def is_back() -> bool:
        return sum(text == "up" for _, text in stage.lines.seen) == 2

    with pytest.raises(StopRequested):
        stage.supervisor.watch(is_back, ask_to_stop)

    assert probes == [stage.state.redis_data] * 5
    told = [line for line in stage.own_lines() if "cannot be written" in line]
    assert len(told) == 1
    assert "No space left on device" in told[0]
    assert "TOKENMILL_STATE_DIR" in told[0]


def test_without_room_the_service_does_not_start_and_says_so(stage: Stage) -> None:
    Blocked(stage.state).room()

    with pytest.raises(
        CannotServe, match="redis cannot be written: No space left on device; make room there"
    ):
        stage.start("redis", POLITE, room=stage.state.redis_data)


def test_a_child_that_cannot_be_started_again_is_tried_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(restarts, "_FIRST_SECONDS", 0.01)
    program = tmp_path / "program"
    program.symlink_to(sys.executable)
    spec = ChildSpec(
        name="worker", command=(str(program), "-c", SLEEPER), environment=os.environ, stop_seconds=60
    )
    stage.supervisor.start(spec)
    stage.lines.wait_for("up")
    program.unlink()
    os.kill(stage.state.processes()["worker"].pid, signal.SIGKILL)

    def is_back() -> bool:
        if any("cannot be started" in line for line in stage.own_lines()) and not program.exists():
            program.symlink_to(sys.executable)
        return sum(text == "up" for _, text in stage.lines.seen) == 2

    with pytest.raises(StopRequested):
        stage.supervisor.watch(is_back, ask_to_stop)

    assert "the worker cannot be started: No such file or directory; trying again" in "".join(
        stage.own_lines()
    )


def test_a_log_that_cannot_be_opened_is_done_without(tmp_path: Path) -> None:
    spec = ChildSpec(
        name="child", command=(sys.executable, "-c", "print('lost')"), environment=os.environ,
        stop_seconds=5, log=tmp_path,
    )  # fmt: skip

    assert Child(spec, (), Lines()).wait() == 0


def test_a_full_disk_below_standard_output_loses_lines_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        LinePrinter(colour=False)("api", "lost")
        assert sys.stdout is full
        # What it still holds cannot be written either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path, WITH_FAKE_ROOMS)
    yield served
    served.end()


def test_redis_ends_for_want_of_room_and_comes_back_with_all_that_was_acknowledged(served: Served) -> None:
    """The limit of a file's size stands for the disk's: Redis fails in the same call, without root."""
    served.wait_until_ready()
    url = str(served.state.address("redis-url"))
    first = served.state.processes()["redis"]
    resource.prlimit(first.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    num_acknowledged = push_until_it_ends(url)

    served.lines.wait_for("the redis ")
    wait_for(lambda: served.state.processes().get("redis", first) != first, "Redis is started again")
    check_kept(url, num_acknowledged)
    served.signal(signal.SIGINT)
    assert served.wait() == 0
    assert any(f"{SELF}  | redis has stopped" in line for line in served.text())
