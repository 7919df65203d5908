"""The directory that `tokenmill serve` keeps between runs, under a lock.

Law: the lock is free only when nothing of an earlier run is alive. Every child inherits the descriptor, and
the kernel lets go of an flock with its last holder; so a supervisor that was killed cannot leave a Redis
server behind on which a second one would be started over the same files. Knows no child by name.
"""

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path

from tokenmill.processes import ProcessId

SELF = "serve"
"""The name under which the supervisor itself is recorded, beside its children."""


class AlreadyRunning(Exception):
    """Another process holds the lock."""


@dataclass(frozen=True)
class StateDirectory:
    """Paths in the directory, and small files in it: `redis-url`, `api-url` and `processes.json`."""

    path: Path

    @property
    def redis_data(self) -> Path:
        return self.path / "redis"

    @property
    def redis_log(self) -> Path:
        return self.path / "redis.log"

    @property
    def lock_file(self) -> Path:
        return self.path / "lock"

    def create(self) -> None:
        """Raises `OSError` where that is not possible."""
        self.redis_data.mkdir(parents=True, exist_ok=True)

    def lock(self) -> int:
        """Take the lock; a descriptor to hold and to hand to every child. Raises `AlreadyRunning`."""
        descriptor = os.open(self.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise AlreadyRunning from None
        return descriptor

    def write_address(self, name: str, address: str) -> None:
        """Record `redis-url` or `api-url`, for other commands and for people."""
        self._write(name, address + "\n")

    def address(self, name: str) -> str | None:
        """The recorded address; None if no service runs."""
        supervisor = self.processes().get(SELF)
        if supervisor is None or not supervisor.is_alive():
            return None
        try:
            return (self.path / name).read_text(encoding="utf-8").strip() or None
        except OSError:
            return None

    def write_processes(self, processes: dict[str, ProcessId]) -> None:
        """Record who belongs to this run, in the order in which they are to be stopped."""
        rows = {name: {"pid": process.pid, "birth": process.birth} for name, process in processes.items()}
        self._write("processes.json", json.dumps(rows, indent=1))

    def processes(self) -> dict[str, ProcessId]:
        """What the last run recorded; empty when there is nothing legible."""
        try:
            rows = json.loads((self.path / "processes.json").read_text(encoding="utf-8"))
            return {name: ProcessId(int(row["pid"]), str(row["birth"])) for name, row in rows.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def forget_run(self) -> None:
        """Nothing runs any more."""
        for name in ("redis-url", "api-url", "processes.json"):
            (self.path / name).unlink(missing_ok=True)

    def _write(self, name: str, text: str) -> None:
        temporary = self.path / f".{name}.new"
        # A Redis URL may hold a password.
        temporary.touch(mode=0o600)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self.path / name)
