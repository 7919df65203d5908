"""A variable that no process reads is reported once, with the name that was probably meant."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill.settings.declarations import ALL, VARIABLES
from tokenmill.settings.unknown import nearest, unknown_variables, warnings

ROOT = Path(__file__).parents[3]


def test_a_mistyped_variable_is_named_with_the_nearest() -> None:
    environ = ["TOKENMILL_MAX_NUM_SEQ", "TOKENMILL_FLUX", "TOKENMILL_PORT", "PATH", "MY_TOKENMILL_X"]

    assert warnings(environ, VARIABLES) == [
        "TOKENMILL_FLUX is not a setting and is ignored",
        "TOKENMILL_MAX_NUM_SEQ is not a setting and is ignored; did you mean TOKENMILL_MAX_NUM_SEQS?",
    ]
    assert unknown_variables(environ, VARIABLES) == ["TOKENMILL_FLUX", "TOKENMILL_MAX_NUM_SEQ"]


def test_every_name_is_suggested_for_a_mistyped_one() -> None:
    for name in ALL:
        middle = len(name) // 2
        assert nearest(f"{name[:middle]}~{name[middle:]}", ALL) == f"; did you mean {name}?"


@pytest.mark.parametrize("process", ["worker", "api"])
def test_a_process_reports_it_once(process: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", process],
        cwd=ROOT,
        # A wrong value ends the process at once.
        env={**os.environ, "TOKENMILL_MAX_NUM_SEQ": "4", "REDIS_URL": "http://h"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 78
    assert done.stderr.count("TOKENMILL_MAX_NUM_SEQ is not a setting") == 1
    assert "did you mean TOKENMILL_MAX_NUM_SEQS?" in done.stderr
