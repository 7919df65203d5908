"""An unexpected end of a program is a complaint. Every end leads to a restart."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.cluster import server_port, until
from tests.chaos.program import Program

WATCHDOG_SECONDS = 120.0


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    """The API, which also runs without Redis."""
    port = server_port()
    env = {**os.environ, "TOKENMILL_PORT": str(port), "REDIS_URL": f"redis://127.0.0.1:{server_port()}"}
    program = Program("api", "api", port=port, health="/livez", env=env, log=tmp_path / "api.log")
    program.start()
    assert until(program.is_healthy, WATCHDOG_SECONDS), program.tail()
    yield program
    program.close()


def wait_for_restart(program: Program) -> None:
    def restarted() -> bool:
        program.restart_if_ended()
        return program.num_starts > 1

    assert until(restarted, WATCHDOG_SECONDS)


def test_an_unexpected_end_is_a_complaint(program: Program) -> None:
    assert program._popen is not None
    os.killpg(program._popen.pid, signal.SIGKILL)
    wait_for_restart(program)
    assert program.complaints == ["api ended by itself with status -9"]


def test_an_expected_end_is_no_complaint(program: Program) -> None:
    program.kill()
    wait_for_restart(program)
    assert until(program.is_healthy, WATCHDOG_SECONDS)
    program.terminate(WATCHDOG_SECONDS)
    assert program.complaints == []


def test_a_program_that_does_not_stop_in_time_is_a_complaint(program: Program) -> None:
    program.freeze()
    program.terminate(0.1)
    assert program.complaints == ["api did not end within 0.1 s of SIGTERM"]
