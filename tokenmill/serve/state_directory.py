"""The directory that `tokenmill serve` keeps between runs, and its lock.

Invariant: the lock is free only if no process of an earlier run is alive. Every child inherits its
descriptor, and the kernel releases an flock when the last descriptor is closed. So no second Redis server is
started over the files of one that a killed supervisor left running. The directory is private to its user: it
holds every prompt and output.
"""

import fcntl
import json
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tokenmill.serve.child_processes import ProcessId

SELF = "serve"
"""The name of the supervisor itself, beside those of its children."""
_PROCESSES = "processes.json"
_RECORDS = ("redis-url", "api-url", _PROCESSES)
_OTHERS = 0o077
_PROBE_BYTES = 1 << 20


class AlreadyRunning(Exception):
    """Another process holds the lock."""


@dataclass(frozen=True)
class StateDirectory:
    """Paths in the directory, and its small files `redis-url`, `api-url` and `processes.json`."""

    path: Path

    @property
    def redis_data(self) -> Path:
        return self.path / "redis"

    @property
    def redis_log(self) -> Path:
        return self.path / "redis.log"

    @property
    def files(self) -> Path:
        """Uploaded files and the results of batches. The API creates it."""
        return self.path / "files"

    @property
    def lock_file(self) -> Path:
        return self.path / "lock"

    def create(self) -> None:
        """Create what is missing and remove the rights of other users from what exists. Raises `OSError`."""
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._is_dedicated():
            _make_private(self.path)
        self.redis_data.mkdir(mode=0o700, exist_ok=True)
        files = [self.path / name for name in _RECORDS]
        for path in (self.lock_file, self.redis_log, *files, self.redis_data, *self.redis_data.rglob("*")):
            _make_private(path)

    def _is_dedicated(self) -> bool:
        """False for a directory with another purpose, such as the home directory. Its own rights are kept."""
        shared = (Path.cwd(), Path("/"), Path(os.path.expanduser("~")))  # pathlib raises without a home
        is_sticky = bool(self.path.stat().st_mode & stat.S_ISVTX)
        return self.lock_file.exists() and not is_sticky and self.path.resolve() not in shared

    def lock(self) -> int:
        """Take the lock. Returns its descriptor, which every child inherits. Raises `AlreadyRunning`."""
        descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise AlreadyRunning from None
        return descriptor

    def write_address(self, name: str, address: str) -> None:
        """Record `redis-url` or `api-url`. Raises `OSError`."""
        self._write(name, address + "\n")

    def address(self, name: str) -> str | None:
        """The recorded address, or None if no service runs."""
        supervisor = self.processes().get(SELF)
        if supervisor is None or not supervisor.is_alive():
            return None
        try:
            return (self.path / name).read_text(encoding="utf-8").strip() or None
        except OSError:
            return None

    def write_processes(self, processes: Mapping[str, ProcessId]) -> None:
        """Record the processes of this run in the order in which they are stopped. Raises `OSError`."""
        rows = {
            name: {"pid": process.pid, "birth": process.start_time} for name, process in processes.items()
        }
        self._write(_PROCESSES, json.dumps(rows, indent=1))

    def processes(self) -> dict[str, ProcessId]:
        """The processes that the last run recorded; empty if there is no readable record."""
        try:
            rows = json.loads((self.path / _PROCESSES).read_text(encoding="utf-8"))
            return {name: ProcessId(int(row["pid"]), str(row["birth"])) for name, row in rows.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def delete_record(self) -> None:
        """For the end of a run. A record that cannot be deleted names processes that are not alive."""
        for name in _RECORDS:
            with suppress(OSError):
                (self.path / name).unlink(missing_ok=True)

    def _write(self, name: str, text: str) -> None:
        """Replace a small file atomically. Raises `OSError`."""
        temporary = self.path / f".{name}.new"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            # A Redis URL may hold a password.
            with open(os.open(temporary, flags, 0o600), "w", encoding="utf-8") as file:
                file.write(text)
            temporary.replace(self.path / name)
        except OSError:
            with suppress(OSError):
                temporary.unlink()
            raise


def check_free_space(directory: Path) -> None:
    """Raises `OSError` unless a megabyte can be written into `directory`."""
    probe = directory / ".space-probe"
    try:
        with open(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            # Some file systems report a full disk only here.
            os.fsync(file.fileno())
    finally:
        with suppress(OSError):
            probe.unlink()


def _make_private(path: Path) -> None:
    """Remove the rights of other users. Raises `OSError`, for example for another user's file."""
    with suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if not stat.S_ISLNK(mode) and mode & _OTHERS:
            path.chmod(stat.S_IMODE(mode) & ~_OTHERS)
