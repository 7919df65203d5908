"""The supervisor with tiny children: order of stopping, restarts, giving up, and what a killed one left."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tokenmill.test_processes import SLEEPER, STUBBORN, Lines
from tokenmill import restarts
from tokenmill.processes import ChildSpec, ProcessId
from tokenmill.signals import StopRequested, StopSignals
from tokenmill.state import SELF, StateDirectory
from tokenmill.supervisor import CannotServe, Supervisor, take_over

POLITE = """
import signal, sys, time
def stop(*_):
    print('bye', flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print('up', flush=True)
time.sleep(300)
"""
# Ends at the second SIGTERM only.
SLOW = """
import signal, sys, time
count = 0
def stop(*_):
    global count
    count += 1
    print('asked', count, flush=True)
    if count == 2:
        sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print('up', flush=True)
while True:
    time.sleep(300)
"""


@dataclass
class Stage:
    """A supervisor with its surroundings."""

    supervisor: Supervisor
    signals: StopSignals
    state: StateDirectory
    lines: Lines

    def start(self, name: str, code: str, **fields: object) -> None:
        command = (sys.executable, "-c", code)
        fields = {"stop_seconds": 60.0, **fields}
        self.supervisor.start(ChildSpec(name=name, command=command, environment=os.environ, **fields))  # type: ignore[arg-type]

    def own_lines(self) -> list[str]:
        return [text for name, text in self.lines.seen if name == SELF]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    state, lines = StateDirectory(tmp_path / "state"), Lines()
    lock = take_over(state, lines)
    with StopSignals() as signals:
        supervisor = Supervisor(state, lock, signals, lines)
        yield Stage(supervisor, signals, state, lines)
        signals.count = 9
        supervisor.stop()
    os.close(lock)


def ask_to_stop() -> None:
    signal.raise_signal(signal.SIGTERM)


def test_children_are_stopped_one_after_the_other_last_first(stage: Stage) -> None:
    for name in ("redis", "worker", "api"):
        stage.start(name, POLITE)
    stage.lines.wait_for("up", times=3)

    with pytest.raises(StopRequested):
        stage.supervisor.watch(lambda: True, ask_to_stop)
    stage.supervisor.stop()

    story = [line for line in stage.lines.seen if line[1] != "up"]
    assert story == [
        ("api", "bye"), (SELF, "api has stopped"),
        ("worker", "bye"), (SELF, "worker has stopped"),
        ("redis", "bye"), (SELF, "redis has stopped"),
    ]  # fmt: skip
    assert stage.state.processes() == {}


def test_readiness_is_told_once(stage: Stage) -> None:
    answers, told = iter([False, True]), []
    stage.start("api", POLITE)
    stage.lines.wait_for("up")

    def on_ready() -> None:
        told.append("ready")
        ask_to_stop()

    with pytest.raises(StopRequested):
        stage.supervisor.watch(lambda: next(answers), on_ready)

    assert told == ["ready"]


def test_a_second_request_is_passed_on(stage: Stage) -> None:
    stage.start("worker", SLOW)
    stage.lines.wait_for("up")

    stage.signals.count = 2
    stage.supervisor.stop()

    assert [text for name, text in stage.lines.seen if name == "worker"] == ["up", "asked 1", "asked 2"]
    assert stage.own_lines() == ["worker has stopped"]


def test_the_third_request_kills(stage: Stage) -> None:
    stage.start("worker", STUBBORN)
    stage.lines.wait_for("up")

    stage.signals.count = 3
    stage.supervisor.stop()

    assert stage.own_lines() == ["the worker does not stop; killing it", "worker was ended by SIGKILL"]


def test_what_takes_too_long_is_killed(stage: Stage) -> None:
    stage.start("worker", STUBBORN, stop_seconds=0.3)
    stage.lines.wait_for("up")

    stage.supervisor.stop()

    assert stage.own_lines()[-1] == "worker was ended by SIGKILL"


def test_a_child_that_dies_is_started_again(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "_FIRST_SECONDS", 0.01)
    stage.start("worker", SLEEPER)
    stage.lines.wait_for("up")
    first = stage.state.processes()["worker"]
    os.kill(first.pid, signal.SIGKILL)

    def is_back() -> bool:
        return sum(text == "up" for _, text in stage.lines.seen) == 2

    with pytest.raises(StopRequested):
        stage.supervisor.watch(is_back, ask_to_stop)

    second = stage.state.processes()["worker"]
    assert second != first
    assert second.is_alive()
    assert "the worker was ended by SIGKILL; starting it again in" in stage.own_lines()[0]


def test_what_never_stays_up_ends_the_service(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "_FIRST_SECONDS", 0.01)
    stage.start("worker", "print('no such model'); raise SystemExit(1)")

    with pytest.raises(CannotServe, match="the worker ended with exit code 1; its last lines are above"):
        stage.supervisor.watch(lambda: False, ask_to_stop)

    assert [text for name, text in stage.lines.seen if name == "worker"] == ["no such model"] * 3


def test_what_cannot_work_is_not_tried_again(stage: Stage) -> None:
    stage.start("worker", "raise SystemExit(78)", final_codes=frozenset({78}))

    with pytest.raises(CannotServe, match="exit code 78"):
        stage.supervisor.watch(lambda: False, ask_to_stop)

    assert stage.own_lines() == []


def test_a_service_that_was_ready_is_not_given_up(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarts, "_FIRST_SECONDS", 0.01)
    monkeypatch.setattr(restarts, "SLOW_SECONDS", 0.01)
    original = stage.supervisor._bury

    def bury(*arguments: object) -> None:
        original(*arguments)  # type: ignore[arg-type]
        if len(stage.own_lines()) == 5:
            ask_to_stop()

    monkeypatch.setattr(stage.supervisor, "_bury", bury)
    stage.start("worker", "raise SystemExit(1)")
    with pytest.raises(StopRequested):
        stage.supervisor.watch(lambda: True, lambda: None)

    assert "ended with exit code 1 4 times in a row" in stage.own_lines()[3]


def test_a_directory_in_use_is_refused(stage: Stage) -> None:
    stage.start("redis", SLEEPER)
    stage.state.write_address("api-url", "http://127.0.0.1:8000")

    with pytest.raises(CannotServe) as raised:
        take_over(stage.state, stage.lines)

    told = str(raised.value)
    assert f"a tokenmill serve (pid {os.getpid()}) already uses" in told
    assert "at http://127.0.0.1:8000" in told
    assert "TOKENMILL_STATE_DIR" in told


def test_a_directory_that_cannot_be_used_is_told(tmp_path: Path) -> None:
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


def test_an_unrecorded_child_of_a_killed_supervisor_is_told(tmp_path: Path) -> None:
    """It may be a Redis server: a second one over the same files would destroy them."""
    state, lines = StateDirectory(tmp_path / "state"), Lines()
    lock = take_over(state, lines)
    state.write_processes({SELF: ProcessId(os.getpid(), "killed")})

    with pytest.raises(CannotServe, match="another process already uses"):
        take_over(state, lines)

    os.close(lock)
