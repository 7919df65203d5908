"""The watchdog ends a stalled process, even one that holds the interpreter's lock, but not a stopped one."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.fakes import until
from worker import watchdog_process as watchdog
from worker.watchdog import WatchdogProcess

ROOT = Path(__file__).parents[2]
STALL_SECONDS = 5.0
"""Long enough for a busy machine to respond."""
TICKING = f"""
import sys, time
from worker.watchdog import arm_watchdog
arm_watchdog({STALL_SECONDS})
print("armed", flush=True)
for line in sys.stdin:
    arm_watchdog({STALL_SECONDS} if line == "tick\\n" else 1e6)
    print(line, end="", flush=True)
"""
STALLED = """
import ctypes, threading
from worker.watchdog import arm_watchdog
arm_watchdog(1.0)
HOW
"""
STALLS = {
    "holding the lock": "ctypes.PyDLL(None).sleep(10_000)",
    "waiting": "threading.Event().wait()",
    "computing": "while True: pass",
    "in another thread": "threading.Thread(target=ctypes.PyDLL(None).sleep, args=(10_000,)).start()",
}


@pytest.mark.parametrize("how", STALLS)
def test_a_stalled_process_ends_with_its_stacks(how: str) -> None:
    program = STALLED.replace("HOW", STALLS[how])
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "most recent call first" in done.stderr


class Ticking:
    """A process that arms its watchdog on request."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", TICKING],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.read() == "armed\n"

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def say(self, line: str) -> str:
        """Send a line. Returns the reply, "" if the process has ended."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.read()


@pytest.fixture
def ticking() -> Iterator[Ticking]:
    ticking = Ticking()
    yield ticking
    ticking.process.kill()
    ticking.process.communicate()


def test_a_process_that_was_stopped_for_longer_resumes(ticking: Ticking) -> None:
    """A worker that was stopped, or whose machine was paused, ended itself when it resumed."""
    ticking.process.send_signal(signal.SIGSTOP)
    # The test is about the time that passes.
    time.sleep(1.6 * STALL_SECONDS)
    ticking.process.send_signal(signal.SIGCONT)
    assert ticking.say("disarm") == "disarm\n"
    assert ticking.process.poll() is None


def test_a_process_that_stalls_after_a_stop_ends(ticking: Ticking) -> None:
    ticking.process.send_signal(signal.SIGSTOP)
    time.sleep(0.2 * STALL_SECONDS)
    ticking.process.send_signal(signal.SIGCONT)
    assert ticking.process.wait(120) == 1


def test_a_killed_watchdog_is_restarted(ticking: Ticking) -> None:
    assert ticking.say("disarm") == "disarm\n"
    (child,) = _children(ticking.process.pid)
    os.kill(child, signal.SIGKILL)
    # A write to a watchdog that has ended fails, and starts another.
    until(lambda: _disarm(ticking) and child not in _children(ticking.process.pid), "another watchdog runs")
    ticking.say("tick")
    assert ticking.process.wait(120) == 1


def test_the_watchdog_ends_with_its_worker(ticking: Ticking) -> None:
    (child,) = _children(ticking.process.pid)
    ticking.process.kill()
    ticking.process.wait()
    until(lambda: not _exists(child), "the watchdog has ended")


def _disarm(ticking: Ticking) -> bool:
    return ticking.say("disarm") == "disarm\n"


def _children(pid: int) -> list[int]:
    """The pids of the child processes."""
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _exists(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("slices", "is_spent"),
    [
        ([(0.25, True)] * 8, True),
        ([(0.25, True)] * 7, False),
        # The process was stopped.
        ([(0.25, False)] * 100, False),
        # The machine was paused.
        ([(3600.0, True)], False),
        ([(3600.0, True)] * 4, True),
    ],
)
def test_only_time_in_which_the_process_ran_counts(slices: list[tuple[float, bool]], is_spent: bool) -> None:
    budget = watchdog.Budget()
    budget.arm(2.0)
    spent = [budget.spend(elapsed, runs=runs) for elapsed, runs in slices]
    assert any(spent) is is_spent


def test_a_watchdog_that_was_never_armed_ends_nothing() -> None:
    assert not watchdog.Budget().spend(3600.0, runs=True)


def test_closing_ends_the_watchdog() -> None:
    guard = WatchdogProcess()
    guard.arm(1e6)
    pid = guard.pid
    assert pid is not None
    assert _exists(pid)
    guard.close()
    assert guard.pid is None
    assert not _exists(pid)


HELD = """
import time
from worker.watchdog import arm_watchdog, disarm_watchdog
arm_watchdog(1.0)
disarm_watchdog()
time.sleep(3.0)
print("alive")
"""


def test_a_disarmed_watchdog_ends_nothing() -> None:
    """A worker that is held, as its model cannot be used, was ended at the deadline of loading."""
    done = subprocess.run(
        [sys.executable, "-c", HELD], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr
