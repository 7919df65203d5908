"""The supervisor with tiny children: order of stopping, restarts and giving up."""

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tokenmill.serve.test_processes import SLEEPER, STUBBORN, Lines
from tokenmill.serve import restarts
from tokenmill.serve.processes import ChildSpec, ProcessId
from tokenmill.serve.signals import StopRequested, StopSignals
from tokenmill.serve.state import SELF, StateDirectory
from tokenmill.serve.supervisor import CannotServe, Supervisor, Unusable, take_over

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


# Ends with a code that is final, but not before it is told to.
REFUSING = """
import signal
signal.signal(signal.SIGUSR1, lambda *_: exit(78))
print('up', flush=True)
signal.pause()
"""
# As a server's master: the worker that it forks lives on when it is killed.
FORKING = """
import os, time
if not os.fork():
    print('forked', os.getpid(), flush=True)
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
        stage = Stage(Supervisor(state, lock, signals, lines), signals, state, lines)
        yield stage
        signals.count = 9
        stage.supervisor.stop()
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

    with pytest.raises(CannotServe, match="the worker ended with exit code 1; its last line: no such model"):
        stage.supervisor.watch(lambda: False, ask_to_stop)

    assert [text for name, text in stage.lines.seen if name == "worker"] == ["no such model"] * 3


def test_what_cannot_work_is_not_tried_again(stage: Stage) -> None:
    stage.start("worker", "raise SystemExit(78)", final_codes=frozenset({78}))

    with pytest.raises(Unusable, match="exit code 78; it said nothing"):
        stage.supervisor.watch(lambda: False, ask_to_stop)

    assert stage.own_lines() == []


def test_what_has_worked_is_tried_again_whatever_its_code(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "_FIRST_SECONDS", 0.01)
    stage.start("api", POLITE, final_codes=frozenset({78}))
    stage.start("worker", REFUSING, final_codes=frozenset({78}))
    stage.lines.wait_for("up", times=2)

    def let_it_end() -> None:
        os.kill(stage.state.processes()["worker"].pid, signal.SIGUSR1)

    def print_line(name: str, text: str) -> None:
        stage.lines(name, text)
        if "starting it again" in text:
            ask_to_stop()

    monkeypatch.setattr(stage.supervisor, "_print", print_line)
    with pytest.raises(StopRequested):
        stage.supervisor.watch(lambda: True, let_it_end)

    assert "the worker ended with exit code 78; starting it again in" in stage.own_lines()[0]


def test_what_a_dead_child_forked_is_gone_before_it_starts_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server's worker that outlives its master keeps the port, and the next master cannot listen."""
    monkeypatch.setattr(restarts, "_FIRST_SECONDS", 0.01)
    stage.start("api", FORKING)
    stage.lines.wait_for("forked")
    forked = ProcessId.of(int(stage.lines.seen[0][1].split()[1]))
    assert forked.is_alive()
    os.kill(stage.state.processes()["api"].pid, signal.SIGKILL)

    def is_back() -> bool:
        return sum("forked" in text for _, text in stage.lines.seen) == 2

    with pytest.raises(StopRequested):
        stage.supervisor.watch(is_back, ask_to_stop)

    assert not forked.is_alive()


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
