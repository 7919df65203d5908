"""Runs one engine in a process: starts it, sends requests, measures it, suspends it while others run, ends
it.

Invariants: no call takes longer than its limit, and `close` leaves no process. Processor time and memory
cover all processes of the session, as the kernel reports them. Linux only.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

TICKS = os.sysconf("SC_CLK_TCK")
GRACE_SECONDS = 5.0
LAST_CHARACTERS = 400
"""Of a log, reported as the reason why a process ended."""


class Failed(Exception):
    """The engine said an error, was silent for too long, or has ended."""


class TooSlow(Failed):
    """No answer within the `seconds` that it had."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer within {seconds:.0f} s")
        self.seconds = seconds


class Answer(NamedTuple):
    """What was said, and what it cost: all of the engine's processors' seconds, and those of everybody else
    on the machine meanwhile."""

    message: dict[str, Any]
    seconds: float
    cpu_seconds: float
    other_cpu_seconds: float


class Child:
    """A process that answers lines of JSON; see `benchmarks/serving/protocol.py`."""

    def __init__(self, command: list[str], *, directory: Path, variables: dict[str, str], log: Path) -> None:
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                cwd=directory,
                env={**os.environ, **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
            )
        self._unread = b""
        self._is_stopped = False

    def __enter__(self) -> "Child":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def ask(self, message: dict[str, Any], limit_seconds: float) -> Answer:
        """Say one line and wait for its answer. Raises `Failed`, and `TooSlow` of those."""
        self.resume()
        line = (json.dumps(message) + "\n").encode()
        begun, own, busy = time.monotonic(), self.cpu_seconds(), machine_busy_seconds()
        answer = self._exchange(line, begun + limit_seconds, limit_seconds)
        seconds, cpu_seconds = time.monotonic() - begun, self.cpu_seconds() - own
        others = max(0.0, machine_busy_seconds() - busy - cpu_seconds)
        if not answer.get("ok"):
            raise Failed(str(answer.get("error", "an answer that says nothing")))
        return Answer(answer, seconds, cpu_seconds, others)

    def stop(self) -> None:
        """Take no processor time until `resume`."""
        if not self._is_stopped:
            self._signal_all(signal.SIGSTOP)
            self._is_stopped = True

    def resume(self) -> None:
        if self._is_stopped:
            self._signal_all(signal.SIGCONT)
            self._is_stopped = False

    def cpu_seconds(self) -> float:
        """Of all its processes, those included that ended and were waited for."""
        return sum(sum(_fields(pid)[11:15]) for pid in self._members()) / TICKS

    def peak_bytes(self) -> int:
        """The most memory that was resident since it began, or since `forget_peak`."""
        return sum(_peak_bytes(pid) for pid in self._members())

    def forget_peak(self) -> None:
        for pid in self._members():
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")

    def close(self) -> None:
        """End it, kindly at first; whatever of its session is left is killed."""
        self.resume()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_SECONDS)
        self._signal_all(signal.SIGKILL)
        self._process.wait()
        # A process of gigabytes takes a while to die, and must not slow whoever is measured next.
        deadline = time.monotonic() + GRACE_SECONDS
        while self._members() and time.monotonic() < deadline:
            time.sleep(0.01)

    def _exchange(self, line: bytes, deadline: float, limit_seconds: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except OSError as error:
            raise self._ended() from error
        while b"\n" not in self._unread:
            self._unread += self._read(deadline, limit_seconds)
        answered, self._unread = self._unread.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(answered)
        return answer

    def _read(self, deadline: float, limit_seconds: float) -> bytes:
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TooSlow(limit_seconds)
        piece = os.read(self._process.stdout.fileno(), 1 << 20)
        if not piece:
            raise self._ended()
        return piece

    def _ended(self) -> Failed:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_SECONDS)
        last = " ".join(self._log.read_text(errors="replace").split())[-LAST_CHARACTERS:]
        return Failed(f"it ended with {self._process.returncode}: ... {last}")

    def _members(self) -> list[int]:
        """The processes of its session."""
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [pid for pid in pids if _fields(pid)[3] == self._process.pid]

    def _signal_all(self, number: signal.Signals) -> None:
        for pid in self._members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _fields(pid: int) -> list[int]:
    """What /proc/PID/stat has after the name: the state (as 0), the parent, the group, the session, and at
    11 to 14 the ticks of itself and its children. Zeros when it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return [0] * 50
    # The name may hold spaces and parentheses.
    after = text.rpartition(")")[2].split()
    return [0, *(int(value) for value in after[1:])]


def _peak_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)


def machine_busy_seconds() -> float:
    """Processors' seconds since the machine began that anybody used, and those stolen by other machines."""
    user, nice, system, _, __, irq, soft, stolen, *___ = map(
        int, Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    )
    return (user + nice + system + irq + soft + stolen) / TICKS
