"""A process with unusable settings exits with 78, or waits if so configured."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.live_service import wait_for

ROOT = Path(__file__).parents[3]
UNUSABLE = {"REDIS_URL": "http://h"}


def start(program: str, hold: str, log: Path) -> "subprocess.Popen[bytes]":
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", program],
            cwd=ROOT,
            env={**os.environ, **UNUSABLE, "TOKENMILL_HOLD_UNUSABLE": hold},
            stderr=output,
        )


@pytest.mark.parametrize(("program", "hold"), [("worker", "true"), ("api", "true"), ("api", "Y")])
def test_it_waits_until_a_signal_ends_it(program: str, hold: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = start(program, hold, log)
    wait_for(lambda: "waiting, to prevent a restart loop" in log.read_text(), "the log line")
    assert "REDIS_URL must be an address" in log.read_text()
    assert process.poll() is None

    process.terminate()

    assert process.wait(60) == -signal.SIGTERM


@pytest.mark.parametrize("program", ["worker", "api"])
@pytest.mark.parametrize("hold", ["", "false"])
def test_without_the_variable_it_exits(program: str, hold: str, tmp_path: Path) -> None:
    assert start(program, hold, tmp_path / "log").wait(60) == 78
