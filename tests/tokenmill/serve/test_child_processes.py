"""Children and orphans: no foreign process is signalled."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.tokenmill.serve.children import IGNORES_SIGTERM, SLEEPER, TIMEOUT_SECONDS, Lines
from tokenmill.serve.child_processes import Child, ChildSpec, ProcessId, stop_orphan


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def orphan() -> Iterator[subprocess.Popen[bytes]]:
    """A process in a group of its own that ignores SIGTERM."""
    process = subprocess.Popen(
        [sys.executable, "-c", IGNORES_SIGTERM],
        process_group=0,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def spec_of(code: str, log: Path | None = None) -> ChildSpec:
    return ChildSpec(
        name="child", command=(sys.executable, "-c", code), environment=os.environ, stop_seconds=5, log=log
    )


def test_a_process_is_identified_by_its_start_time() -> None:
    assert ProcessId.own().is_alive()
    assert not ProcessId(os.getpid(), "another time").is_alive()
    assert not ProcessId(os.getpid(), "").is_alive()


def test_a_zombie_is_not_alive() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    known = ProcessId.of(process.pid)
    assert known.is_alive()

    assert process.stdin is not None
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

    assert not known.is_alive()
    process.wait()


def test_lines_of_a_child_are_printed(lines: Lines) -> None:
    child = Child(spec_of("import sys; print('out'); sys.stderr.write('last'); sys.exit(3)"), (), lines)
    child.finish_output()

    lines.wait_for("last")
    assert {line for _, line in lines.seen} == {"out", "last"}
    assert child.wait() == 3


def test_output_can_go_to_a_file(lines: Lines, tmp_path: Path) -> None:
    log = tmp_path / "log"
    child = Child(spec_of("print('quiet')", log), (), lines)

    assert child.wait() == 0
    assert log.read_text() == "quiet\n"
    assert lines.seen == []


def test_a_child_leads_a_group_of_its_own(lines: Lines) -> None:
    child = Child(spec_of(SLEEPER), (), lines)
    lines.wait_for("up")

    assert os.getpgid(child.id.pid) == child.id.pid != os.getpgid(0)
    child.kill()
    assert child.returncode == -signal.SIGKILL


def test_killing_ends_the_whole_group(lines: Lines) -> None:
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEPER!r}])"
    child = Child(spec_of(parent), (), lines)
    lines.wait_for("up")

    child.kill()

    # The pipe ends when the grandchild, which holds its other end, is gone.
    assert child.finish_output(TIMEOUT_SECONDS)


@pytest.mark.parametrize("call", ["returncode", "wait", "signal", "kill"])
def test_the_group_of_a_child_is_killed_however_its_exit_is_noticed(lines: Lines, call: str) -> None:
    parent = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]); input()"
    child = Child(spec_of(parent), (), lines)
    # The parent exits by itself, as its standard input is empty.
    lines.wait_for("EOFError")
    lines.wait_for("up")
    os.waitid(os.P_PID, child.id.pid, os.WEXITED | os.WNOWAIT)

    calls: dict[str, Callable[[], object]] = {
        "returncode": lambda: child.returncode,
        "wait": child.wait,
        "signal": lambda: child.signal(signal.SIGTERM),
        "kill": child.kill,
    }
    calls[call]()

    assert child.finish_output(TIMEOUT_SECONDS)
    assert child.returncode == 1


def test_the_last_line_is_known(lines: Lines) -> None:
    child = Child(spec_of("print('first'); print('the reason'); print()"), (), lines)
    child.wait()

    assert child.finish_output(TIMEOUT_SECONDS)
    assert child.last_line == "the reason"


def test_an_orphan_that_does_not_stop_is_killed(orphan: subprocess.Popen[bytes]) -> None:
    # Here the orphan is a child of the test, which must reap it.
    reaper = threading.Thread(target=orphan.wait)
    reaper.start()

    stop_orphan(ProcessId.of(orphan.pid), timeout=0.2)

    reaper.join(TIMEOUT_SECONDS)
    assert orphan.returncode == -signal.SIGKILL


def test_a_foreign_process_with_a_recorded_pid_is_not_signalled(orphan: subprocess.Popen[bytes]) -> None:
    stop_orphan(ProcessId(orphan.pid, "another time"), timeout=0.2)

    assert orphan.poll() is None
