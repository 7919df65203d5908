"""Read-only containers: one line that names the directory and the setting (openobserve-helm#54).

Needs the permission to create mount namespaces, which root has.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.services

# The directories that Python tries, with the current directory as the last.
_MOUNTS = """
mount -t tmpfs -o ro tmpfs /var/tmp
mount --bind "$0" "$0" && mount -o remount,bind,ro "$0"
mount -t tmpfs -o ro tmpfs /tmp
cd "$0" && exec "$@"
"""
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(program: Callable[[str], str]) -> Iterator[Run]:
    """Runs a module with a read-only current directory and read-only temporary directories."""
    # Not below /tmp, which is replaced by a mount.
    with tempfile.TemporaryDirectory(prefix="tokenmill-", dir="/dev/shm") as directory:
        namespace = [program("unshare"), "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}

        def run_one(*arguments: str, **settings: str) -> "subprocess.CompletedProcess[str]":
            return subprocess.run(
                [*namespace, "sh", "-ec", _MOUNTS, directory, sys.executable, "-P", "-m", *arguments],
                env={**env, **settings},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )

        yield run_one


def test_a_state_directory_that_cannot_be_created(run: Run) -> None:
    done = run("tokenmill", "serve")

    assert done.returncode == 1
    assert done.stderr == (
        "Error: the state directory .tokenmill cannot be used: Read-only file system: .tokenmill; choose "
        "another with --state-dir or TOKENMILL_STATE_DIR\n"
    )


@pytest.mark.parametrize("room", ["api", "worker"])
def test_no_directory_for_temporary_files(run: Run, room: str) -> None:
    done = run(room, TOKENMILL_PORT="0", TOKENMILL_METRICS_PORT="0")

    assert done.returncode == 78
    (line,) = done.stderr.splitlines()
    assert "No usable temporary directory found in" in line
    assert "set TMPDIR to a writable directory" in line
