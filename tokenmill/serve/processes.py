"""Processes of the supervisor: children in groups of their own, and orphans of an earlier run.

Law: a process that is not ours is never signalled. A recorded pid counts only together with the moment of its
birth, as a pid can be given to a stranger. Knows no setting and no Redis.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_ORPHAN_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class ProcessId:
    """A pid and when that process was born: together they name one process for good."""

    pid: int
    birth: str

    @classmethod
    def of(cls, pid: int) -> "ProcessId":
        return cls(pid, birth(pid) or "")

    @classmethod
    def own(cls) -> "ProcessId":
        return cls.of(os.getpid())

    def is_alive(self) -> bool:
        return bool(self.birth) and birth(self.pid) == self.birth


def birth(pid: int) -> str | None:
    """A text that differs between two processes that had the same pid; None if there is none, or a zombie."""
    try:
        # pid (name) state ppid ... starttime; the name may hold anything, also parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None if Path("/proc/self/stat").exists() else _birth_by_ps(pid)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None if fields[0] == "Z" else f"{boot}/{fields[19]}"


def _birth_by_ps(pid: int) -> str | None:
    """For systems without /proc."""
    listing = subprocess.run(
        ["/bin/ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return listing.stdout.strip() or None


def stop_orphan(process: ProcessId, patience: float) -> None:
    """End what an earlier, killed supervisor left: ask, wait for `patience` seconds, then kill its group."""
    for number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 10.0)):
        if not process.is_alive():
            return
        _signal_group(process.pid, number)
        deadline = time.monotonic() + seconds
        while process.is_alive() and time.monotonic() < deadline:
            time.sleep(_ORPHAN_POLL_SECONDS)


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """How to start a child. `stop_seconds`: how long it may take to end after SIGTERM.

    `log`: its output goes to this file; None: line by line to the supervisor's printer. `final_codes`: exit
    codes that say that another start would end the same way. `stage`: children of one stage are stopped
    together; "" is a stage of its own. `stopping`: what it does after SIGTERM, for people. `kill_hurried`: a
    second request to stop kills it, as it holds nothing that could be lost. `umask`: -1 is the supervisor's.
    `room`: a directory in which it needs room; it is not started again while there is none.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    stop_seconds: float
    log: Path | None = None
    final_codes: frozenset[int] = frozenset()
    stage: str = ""
    stopping: str = "ends"
    kill_hurried: bool = False
    umask: int = -1
    room: Path | None = None


class Child:
    """A running child: the leader of a process group, so that the terminal's Ctrl-C does not reach it.

    Whatever it leaves in its group when it ends is killed with it: a worker that outlives its master would
    keep the port from the next one. `last_line`: what it printed last, "" if nothing or to a log.
    """

    def __init__(self, spec: ChildSpec, inherit: tuple[int, ...], print_line: Callable[[str, str], None]):
        self.spec = spec
        self.last_line = ""
        self._print = print_line
        self._started = time.monotonic()
        with _open_log(spec.log) if spec.log else nullcontext() as log:
            self._process = subprocess.Popen(
                spec.command,
                env=dict(spec.environment),
                stdin=subprocess.DEVNULL,
                stdout=log or subprocess.PIPE,
                stderr=subprocess.STDOUT,
                process_group=0,
                pass_fds=inherit,
                umask=spec.umask,
            )
        self.id = ProcessId.of(self._process.pid)
        self._pump: threading.Thread | None = None
        if stream := self._process.stdout:
            self._pump = threading.Thread(
                target=self._pass_on, args=(stream,), daemon=True, name=f"log-{spec.name}"
            )
            self._pump.start()

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._end(os.WNOHANG)

    @property
    def lived(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self._started

    def signal(self, number: int) -> None:
        """To the child alone, which passes on what its own children must know. Nothing if it has ended."""
        if self.returncode is None:
            # Not send_signal(), which may bury the child without its group. The pid is the child's till then.
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        """At once, with everything in its group."""
        if self.returncode is None:
            _signal_group(self._process.pid, signal.SIGKILL)
            self._end()

    def wait(self) -> int:
        """The exit code, when it has ended."""
        self._end()
        return self._process.wait()

    def finish_output(self, patience: float = 2.0) -> bool:
        """Wait until the last lines are printed. False: a grandchild still holds the pipe."""
        if self._pump is None:
            return True
        self._pump.join(patience)
        return not self._pump.is_alive()

    def _end(self, options: int = 0) -> int | None:
        """Wait for its end, or only look (WNOHANG); then kill what is left of its group. The exit code."""
        process = self._process
        if process.returncode is not None:
            return process.returncode
        if not hasattr(os, "waitid"):
            # macOS before Python 3.13. It gives pids in turn: this one is not a stranger's so soon.
            code = process.poll() if options else process.wait()
            if code is not None:
                _signal_group(process.pid, signal.SIGKILL)
            return code
        if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | options) is None:
            return None
        # The child is not buried yet, so that the group's name, its pid, cannot be a stranger's.
        _signal_group(process.pid, signal.SIGKILL)
        return process.wait()

    def _pass_on(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                text = line.decode(errors="replace").rstrip()
                self.last_line = text or self.last_line
                self._print(self.spec.name, text)


def _open_log(path: Path) -> IO[bytes]:
    """For appending, for its user alone. A log that cannot be opened, as on a full disk, is dropped."""
    try:
        return open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "ab")
    except OSError:
        return open(os.devnull, "ab")


def _signal_group(pid: int, number: int) -> None:
    # macOS refuses a group that has only dead members.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
