"""Child processes in process groups of their own, and orphans of an earlier run.

Invariant: no foreign process is signalled. A recorded pid is used only together with the start time of its
process, because the system reuses pids.
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
    """A pid and the start time of its process. Together they identify a process uniquely."""

    pid: int
    start_time: str

    @classmethod
    def of(cls, pid: int) -> "ProcessId":
        return cls(pid, start_time(pid) or "")

    @classmethod
    def own(cls) -> "ProcessId":
        return cls.of(os.getpid())

    def is_alive(self) -> bool:
        return bool(self.start_time) and start_time(self.pid) == self.start_time


def start_time(pid: int) -> str | None:
    """A text that differs between processes with the same pid; None for a zombie or if no process has it."""
    try:
        # pid (name) state ppid ... starttime; the name may hold anything, also parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None if Path("/proc/self/stat").exists() else _start_time_from_ps(pid)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None if fields[0] == "Z" else f"{boot}/{fields[19]}"


def _start_time_from_ps(pid: int) -> str | None:
    """For systems without /proc."""
    listing = subprocess.run(
        ["/bin/ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return listing.stdout.strip() or None


def stop_orphan(process: ProcessId, timeout: float) -> None:
    """Send SIGTERM to the group of a process, and SIGKILL if it has not exited after `timeout` seconds."""
    for number, seconds in ((signal.SIGTERM, timeout), (signal.SIGKILL, 10.0)):
        if not process.is_alive():
            return
        _signal_group(process.pid, number)
        deadline = time.monotonic() + seconds
        while process.is_alive() and time.monotonic() < deadline:
            time.sleep(_ORPHAN_POLL_SECONDS)


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """How to start and stop a child.

    `stop_seconds`: how long it may run after SIGTERM. `log`: file for its output; None prints its lines.
    `fatal_exit_codes`: exit codes after which a restart would fail the same way. `stop_group`: children of
    one group are stopped together; "" means alone. `while_stopping`: what it does after SIGTERM, for people.
    `kill_on_second_request`: a second request to stop kills it, as it holds nothing that could be lost.
    `umask`: -1 inherits the supervisor's. `data`: directory that it writes; the child is not restarted while
    the disk is full.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    stop_seconds: float
    log: Path | None = None
    fatal_exit_codes: frozenset[int] = frozenset()
    stop_group: str = ""
    while_stopping: str = "exits"
    kill_on_second_request: bool = False
    umask: int = -1
    data: Path | None = None


class Child:
    """A child process that leads a process group of its own, so that the terminal's Ctrl-C does not reach it.

    When it exits, the rest of its group is killed: a grandchild that survives would keep the port.
    `last_line`: the last line that it printed; "" if there is none or it has a log.
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
        self._printer: threading.Thread | None = None
        if stream := self._process.stdout:
            self._printer = threading.Thread(
                target=self._print_lines, args=(stream,), daemon=True, name=f"log-{spec.name}"
            )
            self._printer.start()

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative: the signal that ended it."""
        return self._reap(os.WNOHANG)

    @property
    def uptime(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self._started

    def signal(self, number: int) -> None:
        """Signal the child alone, not its group. Does nothing if it has exited."""
        if self.returncode is None:
            # Not send_signal(), which may reap the child without its group. Until then the pid is not reused.
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Kill the child and its group."""
        if self.returncode is None:
            _signal_group(self._process.pid, signal.SIGKILL)
            self._reap()

    def wait(self) -> int:
        """Wait for the exit and return its code."""
        self._reap()
        return self._process.wait()

    def finish_output(self, timeout: float = 2.0) -> bool:
        """Wait until the last lines are printed. False: a grandchild still holds the pipe."""
        if self._printer is None:
            return True
        self._printer.join(timeout)
        return not self._printer.is_alive()

    def _reap(self, options: int = 0) -> int | None:
        """Wait for the exit, or only poll (WNOHANG), then kill the rest of the group. Returns the code."""
        process = self._process
        if process.returncode is not None:
            return process.returncode
        if not hasattr(os, "waitid"):
            # macOS before Python 3.13. It assigns pids in order: this one is not reused so soon.
            code = process.poll() if options else process.wait()
            if code is not None:
                _signal_group(process.pid, signal.SIGKILL)
            return code
        if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | options) is None:
            return None
        # The child is not reaped yet, so its pid, which names the group, is not reused.
        _signal_group(process.pid, signal.SIGKILL)
        return process.wait()

    def _print_lines(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                text = line.decode(errors="replace").rstrip()
                self.last_line = text or self.last_line
                self._print(self.spec.name, text)


def _open_log(path: Path) -> IO[bytes]:
    """A private file to append to. If it cannot be opened, as on a full disk, the output is dropped."""
    try:
        return open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "ab")
    except OSError:
        return open(os.devnull, "ab")


def _signal_group(pid: int, number: int) -> None:
    # PermissionError: macOS, for a group of zombies.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
