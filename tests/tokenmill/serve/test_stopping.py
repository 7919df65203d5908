"""Stopping reports what it waits for; further requests end the wait; stop groups stop together."""

from pathlib import Path

import pytest

from tests.tokenmill.serve.children import EXITS_ON_SECOND_SIGTERM, EXITS_ON_SIGTERM, IGNORES_SIGTERM
from tests.tokenmill.serve.conftest import SupervisorRun
from tokenmill.serve import stopping

# Two of these exit only when both have been signalled.
PAIRED = """
import pathlib, signal, sys, time
here, own, other = pathlib.Path({directory!r}), {own!r}, {other!r}
def stop(*_):
    (here / own).touch()
    while not (here / other).exists():
        time.sleep(0.01)
    print('bye', flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print('up', flush=True)
time.sleep(300)
"""


def count_at(run: SupervisorRun, part: str, count: int) -> None:
    """Set the number of requests to stop to `count` once the supervisor prints `part`."""

    def on_line(_: str, text: str) -> None:
        if part in text:
            run.signals.count = count

    run.on_line = on_line


def test_a_notice_says_what_is_waited_for_and_how_to_end_it(
    run: SupervisorRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "_FIRST_NOTICE_SECONDS", 0.0)
    monkeypatch.setattr(stopping, "_NOTICE_SECONDS", 0.0)
    run.start("worker", EXITS_ON_SECOND_SIGTERM, while_stopping="finishes its tasks")
    run.lines.wait_for("up")
    count_at(run, "waiting", 2)

    run.signals.count = 1
    run.supervisor.stop()

    waiting = run.own_lines()[0]
    assert waiting.startswith("waiting for the worker, which finishes its tasks (at most ")
    assert waiting.endswith(" s); Ctrl-C again ends it at once, and nothing is lost")
    assert 55 <= float(waiting.split("at most ")[1].split(" s)")[0]) <= 60
    assert run.lines.of("worker") == ["up", "asked 1", "asked 2"]
    assert run.own_lines()[-1] == "worker has stopped"


def test_the_notice_after_the_second_request_says_what_a_third_does(
    run: SupervisorRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "_FIRST_NOTICE_SECONDS", 0.0)
    run.start("worker", IGNORES_SIGTERM)
    run.lines.wait_for("up")
    count_at(run, "once more kills it", 3)

    run.signals.count = 2
    run.supervisor.stop()

    assert run.own_lines()[1:] == ["the worker does not stop; killing it", "worker was ended by SIGKILL"]


def test_a_child_that_holds_nothing_is_killed_by_the_second_request(run: SupervisorRun) -> None:
    run.start("worker", EXITS_ON_SIGTERM)
    run.start("api", IGNORES_SIGTERM, kill_on_second_request=True)
    run.lines.wait_for("up", times=2)

    run.signals.count = 2
    run.supervisor.stop()

    assert run.own_lines() == ["api was ended by SIGKILL", "worker has stopped"]


def test_children_of_a_stop_group_are_stopped_together(run: SupervisorRun, tmp_path: Path) -> None:
    for own, other in (("worker-0", "worker-1"), ("worker-1", "worker-0")):
        code = PAIRED.format(directory=str(tmp_path), own=own, other=other)
        run.start(own, code, stop_group="worker")
    run.start("api", EXITS_ON_SIGTERM)
    run.lines.wait_for("up", times=3)

    run.supervisor.stop()

    ends = [name for name, text in run.lines.seen if text == "bye"]
    assert ends[0] == "api"
    assert sorted(ends[1:]) == ["worker-0", "worker-1"]
    assert all(line.endswith("has stopped") for line in run.own_lines())
