"""The program that ends a worker which hangs: `python -I worker/watchdog_process.py <pid of the worker>`.

The worker writes on its standard input how many seconds from now it is to be ended, one number a line; the
last one counts. Only time in which the worker ran counts: not while it was stopped (SIGSTOP, a debugger),
and not while this program did not run either (a paused container or machine). A process of its own, since no
thread of Python runs while native code holds the interpreter's lock, and a timer counts time in which the
process was stopped.

Ends with the worker. Standard library only, and nothing of ours: it is run as a file.
"""

import contextlib
import os
import select
import signal
import sys
import time
from pathlib import Path

SLICE_SECONDS = 0.25
LONGEST_SLICE_SECONDS = 2 * SLICE_SECONDS
"""What a slice counts at most: a longer one was a pause of this program, and so of the worker."""
END_SECONDS = 10.0
"""For the worker to write its stacks and to end, before it is killed."""


class Budget:
    """The time that a worker has left. None: it was never armed."""

    def __init__(self) -> None:
        self.seconds: float | None = None

    def arm(self, seconds: float) -> None:
        self.seconds = seconds

    def spend(self, elapsed: float, *, runs: bool) -> bool:
        """A slice has passed. Returns whether nothing is left."""
        if self.seconds is None:
            return False
        if runs:
            self.seconds -= min(elapsed, LONGEST_SLICE_SECONDS)
        return self.seconds <= 0


def is_running(pid: int) -> bool:
    """False while the process is stopped. True also where the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    # The name before it is in parentheses, and may hold any character.
    return fields.rpartition(")")[2].split()[0] not in ("T", "t")


def watch(worker: int, end_signal: int) -> None:
    """Until the worker has ended, by itself or by this program."""
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
    # They are for the worker, which is of the same group.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    worker, end_signal = int(sys.argv[1]), int(sys.argv[2])
    watch(worker, end_signal)


if __name__ == "__main__":
    main()
