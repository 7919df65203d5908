"""Stopping says what it waits for, a second request ends it at once, and stages stop together."""

import pytest

from tests.tokenmill.serve.test_processes import STUBBORN
from tests.tokenmill.serve.test_supervisor import POLITE, SLOW, Stage, stage
from tokenmill.serve import stopping
from tokenmill.serve.state import SELF

__all__ = ["stage"]

# Two of these end only when both have been asked to.
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


def test_what_is_waited_for_is_said_with_how_long_and_what_ends_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "_FIRST_NOTICE_SECONDS", 0.0)
    monkeypatch.setattr(stopping, "_NOTICE_SECONDS", 0.0)
    stage.start("worker", SLOW, stopping="finishes its tasks")
    stage.lines.wait_for("up")
    told = stage.lines

    def hurry(name: str, text: str) -> None:
        told(name, text)
        if name == SELF and "waiting" in text:
            stage.signals.count = 2

    monkeypatch.setattr(stage.supervisor, "_print", hurry)
    stage.signals.count = 1
    stage.supervisor.stop()

    waiting = stage.own_lines()[0]
    assert waiting.startswith("waiting for the worker, which finishes its tasks (at most ")
    assert waiting.endswith(" s); Ctrl-C again ends it at once, and nothing is lost")
    assert 55 <= float(waiting.split("at most ")[1].split(" s)")[0]) <= 60
    assert [text for name, text in told.seen if name == "worker"] == ["up", "asked 1", "asked 2"]
    assert stage.own_lines()[-1] == "worker has stopped"


def test_the_notice_after_the_second_request_says_what_a_third_does(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "_FIRST_NOTICE_SECONDS", 0.0)
    stage.start("worker", STUBBORN)
    stage.lines.wait_for("up")
    told = stage.lines

    def hurry(name: str, text: str) -> None:
        told(name, text)
        if name == SELF and "once more kills it" in text:
            stage.signals.count = 3

    monkeypatch.setattr(stage.supervisor, "_print", hurry)
    stage.signals.count = 2
    stage.supervisor.stop()

    assert stage.own_lines()[1:] == ["the worker does not stop; killing it", "worker was ended by SIGKILL"]


def test_what_holds_nothing_is_killed_by_the_second_request(stage: Stage) -> None:
    stage.start("worker", POLITE)
    stage.start("api", STUBBORN, kill_hurried=True)
    stage.lines.wait_for("up", times=2)

    stage.signals.count = 2
    stage.supervisor.stop()

    assert stage.own_lines() == ["api was ended by SIGKILL", "worker has stopped"]


def test_children_of_a_stage_are_stopped_together(stage: Stage, tmp_path: object) -> None:
    for own, other in (("worker-0", "worker-1"), ("worker-1", "worker-0")):
        code = PAIRED.format(directory=str(tmp_path), own=own, other=other)
        stage.start(own, code, stage="worker")
    stage.start("api", POLITE)
    stage.lines.wait_for("up", times=3)

    stage.supervisor.stop()

    ends = [name for name, text in stage.lines.seen if text == "bye"]
    assert ends[0] == "api"
    assert sorted(ends[1:]) == ["worker-0", "worker-1"]
    assert all(line.endswith("has stopped") for line in stage.own_lines())
