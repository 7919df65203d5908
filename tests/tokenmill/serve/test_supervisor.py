"""The supervisor with tiny children: restarts, crash loops, and the order of stopping."""

import os
import signal

import pytest

from tests.tokenmill.serve.children import (
    EXITS_ON_SECOND_SIGTERM,
    EXITS_ON_SIGTERM,
    EXITS_ON_SIGUSR1,
    FORKING,
    IGNORES_SIGTERM,
    SLEEPER,
)
from tests.tokenmill.serve.conftest import SupervisorRun
from tokenmill.serve.child_processes import ProcessId
from tokenmill.serve.errors import CannotServe, FatalExit
from tokenmill.serve.state_directory import SELF
from tokenmill.serve.stop_signals import StopRequested


def request_stop() -> None:
    signal.raise_signal(signal.SIGTERM)


def test_children_stop_one_after_the_other_in_reverse_order(run: SupervisorRun) -> None:
    for name in ("redis", "worker", "api"):
        run.start(name, EXITS_ON_SIGTERM)
    run.lines.wait_for("up", times=3)

    with pytest.raises(StopRequested):
        run.supervisor.watch(lambda: True, request_stop)
    run.supervisor.stop()

    assert [line for line in run.lines.seen if line[1] != "up"] == [
        ("api", "bye"), (SELF, "api has stopped"),
        ("worker", "bye"), (SELF, "worker has stopped"),
        ("redis", "bye"), (SELF, "redis has stopped"),
    ]  # fmt: skip
    assert run.state.processes() == {}


def test_readiness_is_reported_once(run: SupervisorRun) -> None:
    answers, reports = iter([False, True]), []
    run.start("api", EXITS_ON_SIGTERM)
    run.lines.wait_for("up")

    def on_ready() -> None:
        reports.append("ready")
        request_stop()

    with pytest.raises(StopRequested):
        run.supervisor.watch(lambda: next(answers), on_ready)

    assert reports == ["ready"]


def test_a_second_request_is_passed_on(run: SupervisorRun) -> None:
    run.start("worker", EXITS_ON_SECOND_SIGTERM)
    run.lines.wait_for("up")

    run.signals.count = 2
    run.supervisor.stop()

    assert run.lines.of("worker") == ["up", "asked 1", "asked 2"]
    assert run.own_lines() == ["worker has stopped"]


def test_a_third_request_kills(run: SupervisorRun) -> None:
    run.start("worker", IGNORES_SIGTERM)
    run.lines.wait_for("up")

    run.signals.count = 3
    run.supervisor.stop()

    assert run.own_lines() == ["the worker does not stop; killing it", "worker was ended by SIGKILL"]


def test_a_child_that_takes_too_long_to_stop_is_killed(run: SupervisorRun) -> None:
    run.start("worker", IGNORES_SIGTERM, stop_seconds=0.3)
    run.lines.wait_for("up")

    run.supervisor.stop()

    assert run.own_lines()[-1] == "worker was ended by SIGKILL"


@pytest.mark.usefixtures("fast_restarts")
def test_a_child_that_exits_is_restarted(run: SupervisorRun) -> None:
    run.start("worker", SLEEPER)
    run.lines.wait_for("up")
    first = run.state.processes()["worker"]
    os.kill(first.pid, signal.SIGKILL)

    with pytest.raises(StopRequested):
        run.supervisor.watch(lambda: run.lines.count("up") == 2, request_stop)

    second = run.state.processes()["worker"]
    assert second != first
    assert second.is_alive()
    assert "the worker was ended by SIGKILL; starting it again in" in run.own_lines()[0]


@pytest.mark.usefixtures("fast_restarts")
def test_a_crash_loop_ends_a_service_that_was_never_ready(run: SupervisorRun) -> None:
    run.start("worker", "print('no such model'); raise SystemExit(1)")

    with pytest.raises(CannotServe, match="the worker ended with exit code 1; its last line: no such model"):
        run.supervisor.watch(lambda: False, request_stop)

    assert run.lines.of("worker") == ["no such model"] * 3


def test_a_fatal_exit_code_is_not_followed_by_a_restart(run: SupervisorRun) -> None:
    run.start("worker", "raise SystemExit(78)", fatal_exit_codes=frozenset({78}))

    with pytest.raises(FatalExit, match="exit code 78; it printed nothing"):
        run.supervisor.watch(lambda: False, request_stop)

    assert run.own_lines() == []


@pytest.mark.usefixtures("fast_restarts")
def test_no_exit_code_is_fatal_once_the_service_was_ready(run: SupervisorRun) -> None:
    run.start("api", EXITS_ON_SIGTERM, fatal_exit_codes=frozenset({78}))
    run.start("worker", EXITS_ON_SIGUSR1, fatal_exit_codes=frozenset({78}))
    run.lines.wait_for("up", times=2)

    def stop_at_restart(_: str, text: str) -> None:
        if "starting it again" in text:
            request_stop()

    run.on_line = stop_at_restart
    with pytest.raises(StopRequested):
        run.supervisor.watch(
            lambda: True, lambda: os.kill(run.state.processes()["worker"].pid, signal.SIGUSR1)
        )

    assert "the worker ended with exit code 78; starting it again in" in run.own_lines()[0]


@pytest.mark.usefixtures("fast_restarts")
def test_what_a_child_forked_is_killed_before_the_restart(run: SupervisorRun) -> None:
    """A server's worker that outlives its master keeps the port, and the next master cannot listen."""
    run.start("api", FORKING)
    run.lines.wait_for("forked")
    forked = ProcessId.of(int(run.lines.seen[0][1].split()[1]))
    assert forked.is_alive()
    os.kill(run.state.processes()["api"].pid, signal.SIGKILL)

    with pytest.raises(StopRequested):
        run.supervisor.watch(lambda: run.lines.count("forked") == 2, request_stop)

    assert not forked.is_alive()


@pytest.mark.usefixtures("fast_restarts")
def test_a_crash_loop_does_not_end_a_service_that_was_ready(run: SupervisorRun) -> None:
    def stop_at_fifth(name: str, _: str) -> None:
        if name == SELF and len(run.own_lines()) == 5:
            request_stop()

    run.on_line = stop_at_fifth
    run.start("worker", "raise SystemExit(1)")
    with pytest.raises(StopRequested):
        run.supervisor.watch(lambda: True, lambda: None)

    assert "ended with exit code 1 4 times in a row" in run.own_lines()[3]
