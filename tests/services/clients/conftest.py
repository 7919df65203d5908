"""Other programs' clients, each in an environment that `make clients` has made."""

import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.live_service import ROOT, WATCHDOG_SECONDS

ENVIRONMENTS = ROOT / ".tokenmill" / "clients"
RunClient = Callable[..., str]


def command_of(name: str) -> Path:
    """The command `name` of the environment of the same name."""
    directory = ENVIRONMENTS / name
    if not (directory / ".installed").exists():
        pytest.fail(f"{name} is not installed; run `make clients`")
    return directory / "bin" / name


def client_environment(home: Path, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Nothing of this process's settings, and no network beside the service."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "OMP_NUM_THREADS": "1",
        "HF_HOME": str(home / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        **(more or {}),
    }


@pytest.fixture
def run_client(tmp_path: Path) -> RunClient:
    """Run a command with arguments and return what it writes to stdout. AssertionError if it fails."""

    def run(name: str, *arguments: str, env: Mapping[str, str] | None = None, text: str = "") -> str:
        ended = subprocess.run(
            [command_of(name), *arguments],
            cwd=tmp_path,
            env=client_environment(tmp_path, env),
            input=text,
            capture_output=True,
            text=True,
            timeout=WATCHDOG_SECONDS,
        )
        assert ended.returncode == 0, f"{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
        return ended.stdout

    return run
