"""A program of the service that ends by itself is seen to; one that was to end is only started again."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.cluster import quiet_port, until
from tests.chaos.program import Program

WATCHDOG_SECONDS = 120.0


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    """The API, which lives without Redis too."""
    port = quiet_port()
    env = {**os.environ, "TOKENMILL_PORT": str(port), "REDIS_URL": f"redis://127.0.0.1:{quiet_port()}"}
    program = Program("api", "api", port=port, health="/livez", env=env, log=tmp_path / "api.log")
    program.start()
    assert until(program.is_well, WATCHDOG_SECONDS), program.tail()
    yield program
    program.retire()


def tend_until_started_again(program: Program) -> None:
    def tended() -> bool:
        program.tend()
        return program.num_starts > 1

    assert until(tended, WATCHDOG_SECONDS)


def test_an_end_that_nobody_wanted_is_a_complaint(program: Program) -> None:
    assert program._popen is not None
    os.killpg(program._popen.pid, signal.SIGKILL)
    tend_until_started_again(program)
    assert program.complaints == ["api ended by itself with status -9"]


def test_an_end_that_was_wanted_is_none(program: Program) -> None:
    program.kill()
    tend_until_started_again(program)
    assert until(program.is_well, WATCHDOG_SECONDS)
    program.terminate(WATCHDOG_SECONDS)
    assert program.complaints == []


def test_one_that_does_not_end_in_time_is_a_complaint(program: Program) -> None:
    program.freeze()
    program.terminate(0.1)
    assert program.complaints == ["api did not end within 0.1 s of SIGTERM"]
