"""External programs, and the live service that they check. A missing program is a failure, not a skip."""

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.live_service import LiveService
from tests.tiny_models import save_model

MAX_MODEL_LEN = 2048
RQ_DASHBOARD = "rq-dashboard==0.9.0"


@pytest.fixture(scope="session")
def program() -> Callable[[str], str]:
    def find(name: str) -> str:
        found = shutil.which(name)
        if not found:
            pytest.fail(f"{name} is not installed; these tests need system packages")
        return found

    return find


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="module")
def live(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    """One service for each test file."""
    env = {
        "TOKENMILL_MAX_MODEL_LEN": str(MAX_MODEL_LEN),
        "TOKENMILL_NUM_KV_BLOCKS": "1024",
        "TOKENMILL_MAX_NUM_SEQS": "8",
    }
    with LiveService(tiny_model, tmp_path_factory.mktemp("live"), env) as service:
        yield service


@pytest.fixture(scope="session")
def rq_dashboard() -> Path:
    """The command, installed in a separate environment that later runs reuse.

    It needs `six` without declaring it, which the service's environment does not have.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenmill-tests"
    directory = cache / f"{RQ_DASHBOARD.replace('==', '-')}-python{sys.version_info[0]}.{sys.version_info[1]}"
    complete = directory / "complete"
    if not complete.exists():
        shutil.rmtree(directory, ignore_errors=True)
        venv.create(directory, with_pip=True)
        pip = [str(directory / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install"]
        subprocess.run([*pip, "--quiet", RQ_DASHBOARD, "six"], check=True)
        complete.touch()
    return directory / "bin" / "rq-dashboard"
