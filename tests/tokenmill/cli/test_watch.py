"""`tokenmill watch` shows the position of a task that waits, then its text, and tells how it ended."""

import json

import pytest
from click.testing import CliRunner, Result

from tests.tokenmill.cli.fake_service import Answer, FakeService, finished, problem, task, token
from tokenmill.cli import main as cli
from tokenmill.cli import watch_command
from tokenmill.cli.main import FAILED, REFUSED

pytestmark = pytest.mark.usefixtures("clean_environment")

TEXT = Answer([token(0, "Pa"), token(1, "ris"), finished(2, text=".")])
SUMMARY = "task t1: completed, 3 + 2 tokens"


def watch(service: FakeService, *flags: str) -> Result:
    return CliRunner().invoke(cli.main, ["watch", *flags, "t1", "--url", service.url])


def test_a_task_is_followed_to_its_end(service: FakeService) -> None:
    service.will_answer(Answer(task("in_progress")), TEXT, Answer(task("completed")))

    result = watch(service)

    assert (result.exit_code, result.stdout, result.stderr) == (0, "Paris.\n", f"{SUMMARY}\n")


def test_a_task_can_be_followed_from_an_event_on(service: FakeService) -> None:
    rest = Answer([token(1, "ris"), finished(2, text=".")])
    service.will_answer(Answer(task("in_progress")), rest, Answer(task("completed")))

    assert watch(service, "--after", "0").stdout == "ris.\n"
    assert service.calls[1].headers["last-event-id"] == "0"


def test_an_ended_task_without_further_events(service: FakeService) -> None:
    service.will_answer(Answer(task("cancelled")), Answer([], 204), Answer(task("cancelled")))

    result = watch(service, "--after", "7")

    assert (result.exit_code, result.stdout) == (FAILED, "\n")
    assert result.stderr == "task t1: cancelled, 3 + 2 tokens\nError: the task ended as cancelled\n"


def test_events_as_lines_of_json(service: FakeService) -> None:
    service.will_answer(Answer(task("in_progress")), TEXT, Answer(task("completed")))

    events = [json.loads(line) for line in watch(service, "--json").stdout.splitlines()]

    assert [(event["seq"], event["text"]) for event in events] == [(0, "Pa"), (1, "ris"), (2, ".")]


def test_a_terminal_shows_the_position_of_a_waiting_task(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_command, "is_terminal", lambda: True)
    queue = {"position": 3, "tokens_ahead": 812, "eta_seconds": 12.5, "waiting_for": "capacity"}
    service.will_answer(
        Answer(task("queued", queue=queue)),
        Answer(task("queued", queue={**queue, "position": 1, "eta_seconds": None})),
        Answer(task("in_progress")),
        TEXT,
        Answer(task("completed")),
    )

    lines = watch(service).stderr.replace("\033[K", "").split("\r")

    assert lines == [
        "", "waiting for capacity, 3 before it, about 12 s", "waiting for capacity, 1 before it",
        f"{SUMMARY}\n",
    ]  # fmt: skip


def test_an_unknown_task_is_one_line(service: FakeService) -> None:
    service.will_answer(Answer(problem("task_not_found", "there is no such task"), 404))

    result = watch(service)

    assert (result.exit_code, result.stderr) == (REFUSED, "Error: there is no such task\n")
