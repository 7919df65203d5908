"""A variable that no process reads is said so once, with the name that was probably meant."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill.config import BY_NAME, SETTINGS
from tokenmill.process.variables import NAMES, hint, unknown_variables, warnings

ROOT = Path(__file__).parents[4]


def test_the_names_are_those_of_the_settings() -> None:
    assert {setting.variable for setting in SETTINGS} - {"REDIS_URL"} == NAMES


def test_a_mistyped_variable_is_named_with_the_nearest() -> None:
    environ = ["TOKENMILL_MAX_NUM_SEQ", "TOKENMILL_FLUX", "TOKENMILL_PORT", "PATH", "MY_TOKENMILL_X"]

    assert warnings(environ) == [
        "TOKENMILL_FLUX is not a setting and is ignored",
        "TOKENMILL_MAX_NUM_SEQ is not a setting and is ignored; did you mean TOKENMILL_MAX_NUM_SEQS?",
    ]
    assert unknown_variables(environ) == ["TOKENMILL_FLUX", "TOKENMILL_MAX_NUM_SEQ"]


def test_every_name_is_found_by_a_typing_error() -> None:
    for name in BY_NAME:
        middle = len(name) // 2
        assert hint(f"{name[:middle]}~{name[middle:]}", BY_NAME) == f"; did you mean {name}?"


@pytest.mark.parametrize("room", ["worker", "api"])
def test_a_room_says_so_once(room: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", room],
        cwd=ROOT,
        # It ends at once, of a bad value.
        env={**os.environ, "TOKENMILL_MAX_NUM_SEQ": "4", "REDIS_URL": "http://h"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 78
    assert done.stderr.count("TOKENMILL_MAX_NUM_SEQ is not a setting") == 1
    assert "did you mean TOKENMILL_MAX_NUM_SEQS?" in done.stderr
