"""A full disk ends nothing: the supervisor continues, and Redis is restarted once there is space.

redis#1522: with `appendfsync always` a server ends itself when it cannot write its append-only file.
"""

import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acknowledged_writes import check_kept, push_until_it_ends
from tests.live_service import wait_for
from tests.tokenmill.serve.children import EXITS_ON_SIGTERM, SLEEPER, Lines
from tests.tokenmill.serve.conftest import SupervisorRun
from tests.tokenmill.serve.served import WITH_FAKES, Served
from tests.tokenmill.serve.test_supervisor import request_stop
from tokenmill.cli.console import LinePrinter
from tokenmill.serve import supervisor
from tokenmill.serve.child_processes import Child, ChildSpec
from tokenmill.serve.errors import CannotServe
from tokenmill.serve.run_record import RunRecord
from tokenmill.serve.state_directory import SELF, StateDirectory
from tokenmill.serve.stop_signals import StopRequested


class Blocked:
    """Makes writes to files of the state directory fail."""

    def __init__(self, state: StateDirectory) -> None:
        self._state = state
        state.create()

    def records(self, name: str) -> None:
        (self._state.path / f".{name}.new").mkdir()

    def free_records(self, name: str) -> None:
        (self._state.path / f".{name}.new").rmdir()

    def free_space(self) -> None:
        (self._state.redis_data / ".space-probe").symlink_to("/dev/full")


def test_a_record_that_cannot_be_written_is_written_later(tmp_path: Path) -> None:
    state, lines = StateDirectory(tmp_path / "state"), Lines()
    blocked = Blocked(state)
    blocked.records("api-url")
    blocked.records("redis-url")
    record = RunRecord(state, lines)

    record.set_address("api-url", "http://127.0.0.1:1")
    record.set_address("redis-url", "unix:///s")
    record.write_pending()
    assert not record.is_written
    assert len(lines.seen) == 1
    assert f"{state.path} cannot be written: " in lines.seen[0][1]

    blocked.free_records("api-url")
    blocked.free_records("redis-url")
    record.write_pending()
    assert record.is_written
    assert (state.path / "api-url").read_text() == "http://127.0.0.1:1\n"
    assert (state.path / "redis-url").read_text() == "unix:///s\n"


@pytest.mark.usefixtures("fast_restarts")
def test_a_restart_happens_even_if_it_cannot_be_recorded(
    run: SupervisorRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_RECORD_RETRY_SECONDS", 0.01)
    run.start("worker", SLEEPER)
    run.lines.wait_for("up")
    first = run.state.processes()["worker"]
    Blocked(run.state).records("processes.json")
    os.kill(first.pid, signal.SIGKILL)

    def is_back() -> bool:
        if sum(text == "up" for _, text in run.lines.seen) == 2 and not run.supervisor.record.is_written:
            Blocked(run.state).free_records("processes.json")
        return run.supervisor.record.is_written and run.state.processes()["worker"] != first

    with pytest.raises(StopRequested):
        run.supervisor.watch(is_back, request_stop)

    assert run.state.processes()["worker"].is_alive()


@pytest.mark.usefixtures("fast_restarts")
def test_a_restart_waits_for_space(run: SupervisorRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exits because of a full disk are not a crash loop."""
    monkeypatch.setattr(supervisor, "_SPACE_POLL_SECONDS", 0.01)
    monkeypatch.setattr(supervisor, "_READY_POLL_SECONDS", 0.01)
    run.start("redis", SLEEPER, data=run.state.redis_data)
    run.lines.wait_for("up")
    probes: list[Path] = []

    def check_free_space(directory: Path) -> None:
        probes.append(directory)
        if len(probes) < 5:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(supervisor, "check_free_space", check_free_space)
    os.kill(run.state.processes()["redis"].pid, signal.SIGKILL)

    def is_back() -> bool:
        return sum(text == "up" for _, text in run.lines.seen) == 2

    with pytest.raises(StopRequested):
        run.supervisor.watch(is_back, request_stop)

    assert probes == [run.state.redis_data] * 5
    reports = [line for line in run.own_lines() if "cannot be written" in line]
    assert len(reports) == 1
    assert "No space left on device" in reports[0]
    assert "TOKENMILL_STATE_DIR" in reports[0]


def test_a_full_disk_prevents_the_start(run: SupervisorRun) -> None:
    Blocked(run.state).free_space()

    with pytest.raises(
        CannotServe, match="redis cannot be written: No space left on device; free some space there"
    ):
        run.start("redis", EXITS_ON_SIGTERM, data=run.state.redis_data)


@pytest.mark.usefixtures("fast_restarts")
def test_a_restart_that_fails_is_repeated(
    run: SupervisorRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "program"
    program.symlink_to(sys.executable)
    spec = ChildSpec(
        name="worker", command=(str(program), "-c", SLEEPER), environment=os.environ, stop_seconds=60
    )
    run.supervisor.start(spec)
    run.lines.wait_for("up")
    program.unlink()
    os.kill(run.state.processes()["worker"].pid, signal.SIGKILL)

    def is_back() -> bool:
        if any("cannot be started" in line for line in run.own_lines()) and not program.exists():
            program.symlink_to(sys.executable)
        return sum(text == "up" for _, text in run.lines.seen) == 2

    with pytest.raises(StopRequested):
        run.supervisor.watch(is_back, request_stop)

    assert "the worker cannot be started: No such file or directory; trying again" in "".join(run.own_lines())


def test_a_log_that_cannot_be_opened_is_dropped(tmp_path: Path) -> None:
    spec = ChildSpec(
        name="child", command=(sys.executable, "-c", "print('lost')"), environment=os.environ,
        stop_seconds=5, log=tmp_path,
    )  # fmt: skip

    assert Child(spec, (), Lines()).wait() == 0


def test_a_full_disk_under_standard_output_only_loses_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        printer = LinePrinter(colour=False)
        printer("api", "lost")
        printer.flush()
        # Its buffer cannot be written at its end either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path, WITH_FAKES)
    yield served
    served.end()


def test_redis_exits_on_a_full_disk_and_returns_with_every_acknowledged_write(served: Served) -> None:
    """A limit on the size of files simulates the full disk: Redis fails in the same call."""
    served.wait_until_ready()
    url = str(served.state.address("redis-url"))
    first = served.state.processes()["redis"]
    resource.prlimit(first.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))
    num_acknowledged = push_until_it_ends(url)

    served.lines.wait_for("the redis ")
    wait_for(lambda: served.state.processes().get("redis", first) != first, "Redis is started again")
    check_kept(url, num_acknowledged)
    served.signal(signal.SIGINT)
    assert served.wait() == 0
    assert any(f"{SELF}  | redis has stopped" in line for line in served.text())
