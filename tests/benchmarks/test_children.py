"""An engine's process: asked, measured, stopped and ended, whatever it does."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving.children import Child, Failed, TooSlow
from benchmarks.serving.protocol import Settings

ROOT = Path(__file__).parents[2]
LIMIT = 60.0
SETTINGS = Settings("", "float32", 1, 8, 4, 64, 64, 64, "", {})


@contextmanager
def echo(tmp_path: Path, **options: Any) -> Iterator[Child]:
    command = [sys.executable, "-m", "tests.benchmarks.echo_peer"]
    with Child(command, directory=ROOT, variables={}, log=tmp_path / "log") as child:
        child.ask({"op": "load", "settings": SETTINGS._replace(options=options)._asdict()}, LIMIT)
        yield child


RUN = {"op": "run", "requests": [[[1, 2], 2, 0.0], [[3], 1, 0.02]]}


def test_it_answers_with_tokens_and_times(tmp_path: Path) -> None:
    with echo(tmp_path) as child:
        message = child.ask(RUN, LIMIT).message
    assert message["tokens"] == [[0, 0], [1]]
    assert [len(times) for times in message["times"]] == [2, 1]
    assert message["times"][1][0] >= 0.02


def test_processor_time_is_told(tmp_path: Path) -> None:
    with echo(tmp_path, works=True) as child:
        answer = child.ask(RUN, LIMIT)
        assert 0.09 <= answer.cpu_seconds <= answer.seconds + 0.05
        assert child.peak_bytes() > 2**20


def test_an_error_is_told_and_the_next_line_is_answered(tmp_path: Path) -> None:
    with echo(tmp_path, fails=True) as child:
        for _ in range(2):
            with pytest.raises(Failed, match="RuntimeError: as requested"):
                child.ask(RUN, LIMIT)


def test_one_that_dies_is_told_with_its_code(tmp_path: Path) -> None:
    with echo(tmp_path, dies=True) as child, pytest.raises(Failed, match="it ended with 7"):
        child.ask(RUN, LIMIT)


def test_one_that_is_silent_is_ended_with_all_its_processes(tmp_path: Path) -> None:
    with echo(tmp_path, hangs=True, child=True) as child:
        members = child._members()
        assert len(members) == 2
        with pytest.raises(TooSlow, match="no answer within 0 s") as error:
            child.ask(RUN, 0.2)
    assert error.value.seconds == 0.2
    # The grandchild is nobody's to wait for here: dead is enough.
    assert all(not is_alive(pid) for pid in members)


def test_while_stopped_it_takes_no_time_and_then_goes_on(tmp_path: Path) -> None:
    with echo(tmp_path) as child:
        child.stop()
        (pid,) = child._members()
        deadline = time.monotonic() + LIMIT
        while state(pid) != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert state(pid) == "T"
        assert child.ask(RUN, LIMIT).message["tokens"] == [[0, 0], [1]]


def test_a_stopped_one_is_ended_too(tmp_path: Path) -> None:
    with echo(tmp_path) as child:
        (pid,) = child._members()
        child.stop()
    assert not is_alive(pid)


def is_alive(pid: int) -> bool:
    """Also false for one that has ended and waits to be waited for."""
    return os.path.exists(f"/proc/{pid}") and state(pid) not in ("Z", "X")


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return "X"
