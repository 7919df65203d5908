"""Without a directory for temporary files a process exits before starting anything, with one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_PROGRAM = """
import runpy, sys, tempfile
tempfile._candidate_tempdir_list = lambda: ['/dev/full/x', '/proc']
sys.argv = [{program!r}, *{arguments!r}]
runpy.run_module({program!r}, run_name='__main__', alter_sys=True)
"""


@pytest.mark.parametrize(
    ("program", "arguments", "code"), [("worker", [], 78), ("api", [], 78), ("tokenmill", ["serve"], 2)]
)
def test_a_missing_temporary_directory_is_an_error(
    tmp_path: Path, program: str, arguments: list[str], code: int
) -> None:
    """The candidates are replaced; with read-only mounts in tests/services/test_read_only.py."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(program=program, arguments=arguments)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TOKENMILL_PORT": "0", "TOKENMILL_METRICS_PORT": "0"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == code
    (line,) = [line for line in (done.stdout + done.stderr).splitlines() if "temporary" in line]
    assert "No usable temporary directory found in ['/dev/full/x', '/proc']; set TMPDIR" in line
    assert "Traceback" not in done.stderr
