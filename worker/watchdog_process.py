"""The program that ends a stalled worker: `python -I worker/watchdog_process.py <worker's pid> <signal>`.

The worker writes deadlines to its standard input: seconds from now, one number a line; the last one counts.
Only time in which the worker ran counts, not time in which it was stopped (SIGSTOP, a debugger) or in which
this program did not run either (a paused container or machine). It is a process of its own because no Python
thread runs while native code holds the interpreter's lock, and because a timer counts while the process is
stopped.

Ends with the worker. It uses only the standard library, since it runs as a file.
"""

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

SLICE_SECONDS = 0.25
MAX_SLICE_SECONDS = 2 * SLICE_SECONDS
"""A slice counts at most this long. A longer one was a pause of this program, and so of the worker."""
END_SECONDS = 10.0
"""Time for the worker to write its stacks and end, before it is killed."""


class Budget:
    """The time that a worker has left. None if it was never armed."""

    def __init__(self) -> None:
        self.seconds: float | None = None

    def arm(self, seconds: float) -> None:
        self.seconds = seconds

    def spend(self, elapsed: float, *, runs: bool) -> bool:
        """Count a slice. Returns whether the budget is used up."""
        if self.seconds is None:
            return False
        if runs:
            self.seconds -= min(elapsed, MAX_SLICE_SECONDS)
        return self.seconds <= 0


def is_running(pid: int) -> bool:
    """False while the process is stopped. True if the system cannot tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    # The name before the state is in parentheses and may contain any character.
    return fields.rpartition(")")[2].split()[0] not in ("T", "t")


def watch(worker: int, end_signal: int) -> None:
    """Return when the worker has ended, by itself or by this program."""
    budget, rest, before = Budget(), b"", time.monotonic()
    while os.getppid() == worker:
        readable, _, _ = select.select([0], [], [], SLICE_SECONDS)
        now = time.monotonic()
        if readable:
            received = os.read(0, 65536)
            if not received:
                return
            *lines, rest = (rest + received).split(b"\n")
            if lines:
                budget.arm(float(lines[-1]))
        elif budget.spend(now - before, runs=is_running(worker)):
            end(worker, end_signal)
            return
        before = now


def end(worker: int, end_signal: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker, end_signal)
        deadline = time.monotonic() + END_SECONDS
        while os.getppid() == worker and time.monotonic() < deadline:
            time.sleep(SLICE_SECONDS)
        if os.getppid() == worker:
            os.kill(worker, signal.SIGKILL)


def main() -> None:
    # These signals are meant for the worker, which is in the same process group.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    worker, end_signal = int(sys.argv[1]), int(sys.argv[2])
    watch(worker, end_signal)


if __name__ == "__main__":
    main()
