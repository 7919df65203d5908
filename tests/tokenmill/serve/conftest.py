"""Fixtures: a supervisor that records what it prints, and one that restarts its children at once."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tokenmill.serve.children import Lines
from tokenmill.serve import restart_backoff
from tokenmill.serve.child_processes import ChildSpec
from tokenmill.serve.state_directory import SELF, StateDirectory
from tokenmill.serve.stop_signals import StopSignals
from tokenmill.serve.supervisor import Supervisor
from tokenmill.serve.take_over import take_over


class SupervisorRun:
    """`on_line` is called for each line after it was recorded; a test may replace it."""

    def __init__(self, state: StateDirectory, lock: int, signals: StopSignals) -> None:
        self.state = state
        self.signals = signals
        self.lines = Lines()
        self.on_line: Callable[[str, str], None] = lambda _name, _text: None
        self.supervisor = Supervisor(state, lock, signals, self._print)

    def start(self, name: str, code: str, **fields: Any) -> None:
        command = (sys.executable, "-c", code)
        fields = {"stop_seconds": 60.0, **fields}
        self.supervisor.start(ChildSpec(name=name, command=command, environment=os.environ, **fields))

    def own_lines(self) -> list[str]:
        return self.lines.of(SELF)

    def _print(self, name: str, text: str) -> None:
        self.lines(name, text)
        self.on_line(name, text)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SupervisorRun]:
    state = StateDirectory(tmp_path / "state")
    lock = take_over(state, Lines())
    with StopSignals() as signals:
        run = SupervisorRun(state, lock, signals)
        yield run
        signals.count = 9
        run.supervisor.stop()
    os.close(lock)


@pytest.fixture
def fast_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restart_backoff, "_FIRST_SECONDS", 0.01)
    monkeypatch.setattr(restart_backoff, "SLOW_SECONDS", 0.01)
