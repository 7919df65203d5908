"""A cache directory that cannot be written is one line with its name and its setting (ado PR1261)."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill.settings.errors import SettingError
from worker.cache_directory import usable_cache

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["/c/cache", "/c/cache/model/part", "/c", b"/c/cache/x"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.ENOTDIR])
def test_a_write_that_fails_there_names_directory_and_setting(name: str | bytes, number: int) -> None:
    with pytest.raises(SettingError) as raised, usable_cache("/c/cache"):
        raise OSError(number, os.strerror(number), name)

    told = str(raised.value)
    assert told.startswith(f"the cache directory /c/cache cannot be written: {os.strerror(number)}")
    assert "TOKENMILL_CACHE_DIR" in told


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EACCES, "denied", "/elsewhere"),
        OSError(errno.EIO, "broken", "/c/cache/x"),
        OSError("no file"),
        ValueError("/c/cache"),
    ],
)
def test_other_errors_are_others(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, usable_cache("/c/cache"):
        raise error
    assert raised.value is error


def test_the_default_model_has_nowhere_to_be_converted_to(redis_url: str, tmp_path: Path) -> None:
    """Below a file, where root cannot write either."""
    (tmp_path / "file").touch()
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("TOKENMILL_")},
        "REDIS_URL": redis_url,
        "TOKENMILL_METRICS_PORT": "0",
        "TOKENMILL_CACHE_DIR": str(tmp_path / "file" / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "worker"], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )

    assert done.returncode == 78
    last = done.stderr.splitlines()[-1]
    assert f"the cache directory {env['TOKENMILL_CACHE_DIR']} cannot be written: Not a directory" in last
    assert "Traceback" not in done.stderr
