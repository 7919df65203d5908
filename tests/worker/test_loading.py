"""Failures of the machine while a model loads, and imports without the garbage collector."""

import errno
import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenmill.settings.errors import SettingError
from worker.loading import cache_errors_as_settings, gc_paused

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["/c/cache", "/c/cache/model/part", "/c", b"/c/cache/x"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.ENOTDIR])
def test_a_failed_write_names_directory_and_setting(name: str | bytes, number: int) -> None:
    """ado PR1261: a cache directory that cannot be written is one line that names it and its setting."""
    with pytest.raises(SettingError) as raised, cache_errors_as_settings("/c/cache"):
        raise OSError(number, os.strerror(number), name)

    message = str(raised.value)
    assert message.startswith(f"the cache directory /c/cache cannot be written: {os.strerror(number)}")
    assert "TOKENMILL_CACHE_DIR" in message


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EACCES, "denied", "/elsewhere"),
        OSError(errno.EIO, "broken", "/c/cache/x"),
        OSError("no file"),
        ValueError("/c/cache"),
    ],
)
def test_other_errors_pass_unchanged(error: Exception) -> None:
    with pytest.raises(type(error)) as raised, cache_errors_as_settings("/c/cache"):
        raise error
    assert raised.value is error


def test_a_worker_without_a_writable_cache_directory_exits(redis_url: str, tmp_path: Path) -> None:
    """The directory is below a file, where root cannot write either."""
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


class SelfReference:
    """An object that refers to itself, so that only the collector frees it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def _unfreeze() -> Iterator[None]:
    yield
    gc.unfreeze()
    assert gc.isenabled()


def test_the_collector_is_paused_within_the_context() -> None:
    with gc_paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_the_collector_resumes_when_an_import_fails() -> None:
    with pytest.raises(ImportError), gc_paused():
        raise ImportError("no such library")
    assert gc.isenabled()


def test_objects_of_the_imports_are_frozen_and_later_objects_are_not() -> None:
    with gc_paused():
        early = weakref.ref(SelfReference())
    late = weakref.ref(SelfReference())
    gc.collect()
    assert early() is not None
    assert late() is None
