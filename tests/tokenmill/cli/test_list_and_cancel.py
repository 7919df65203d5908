"""`tokenmill list` shows the tasks that its filters select; `cancel --all` cancels the active ones."""

import json
import time
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.tokenmill.cli.fake_service import Answer, FakeService, problem, task
from tokenmill.cli import cancel_command
from tokenmill.cli import main as cli
from tokenmill.cli.list_command import age
from tokenmill.cli.main import FAILED, MISUSED

pytestmark = pytest.mark.usefixtures("clean_environment")


def invoke(service: FakeService, *arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli.main, [*arguments, "--url", service.url], input=stdin)


def page(*tasks: dict[str, Any], after: str | None = None) -> Answer:
    return Answer({"object": "list", "data": tasks, "has_more": after is not None, "next": after})


def named(name: str, status: str = "queued", **members: Any) -> dict[str, Any]:
    return {**task(status), "id": name, **members}


def test_a_list_is_a_table(service: FakeService) -> None:
    error = {"type": "x", "code": "prompt_too_long", "message": "y", "param": None}
    waiting = named("b", created_at=time.time() - 7300, usage=None)
    failed = named("a", "failed", error=error, created_at=time.time() - 90 * 86400)
    failed["timings"]["total_seconds"] = 1.25
    service.will_answer(page(waiting, failed))

    result = invoke(service, "list")

    assert result.exit_code == 0
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["ID", "STATUS", "AGE", "TOKENS", "SECONDS", "MODEL", "NOTE"],
        ["b", "queued", "2h", "-", "-", "tiny"],
        ["a", "failed", "90d", "3+2", "1.2", "tiny", "prompt_too_long"],
    ]


def test_a_list_without_tasks_has_headings(service: FakeService) -> None:
    service.will_answer(page())

    assert invoke(service, "list").stdout.split()[:2] == ["ID", "STATUS"]


def test_a_list_has_filters(service: FakeService) -> None:
    service.will_answer(page())
    before = time.time()

    invoke(
        service, "list", "--status", "failed", "--model", "tiny", "--metadata", "user=ann",
        "--metadata", "a=b=c", "--since", "2h", "--until", "90s", "--limit", "7",
    )  # fmt: skip

    query = dict(pair.split("=", 1) for pair in service.calls[0].path.partition("?")[2].split("&"))
    since, until = float(query.pop("created_after")), float(query.pop("created_before"))
    assert query == {
        "limit": "8", "status": "failed", "model": "tiny", "metadata.user": "ann", "metadata.a": "b%3Dc",
    }  # fmt: skip
    assert before - 7200 <= since <= time.time() - 7200
    assert before - 90 <= until <= time.time() - 90


def test_a_list_says_if_there_are_more(service: FakeService) -> None:
    service.will_answer(page(named("c"), named("b"), named("a"), after="next"))

    result = invoke(service, "list", "--limit", "2")

    assert [line.split()[0] for line in result.stdout.splitlines()] == ["ID", "c", "b"]
    assert result.stderr == "there are more; --limit 20 shows up to 20\n"


def test_a_list_as_json(service: FakeService) -> None:
    sent = [named("b"), named("a")]
    service.will_answer(page(*sent))

    assert json.loads(invoke(service, "list", "--json").stdout) == sent


@pytest.mark.parametrize(
    "flag", ["--since=soon", "--since=-1h", "--metadata=user", "--metadata==x", "--status=x", "--limit=0"]
)
def test_a_malformed_filter_is_wrong_usage(service: FakeService, flag: str) -> None:
    assert invoke(service, "list", flag).exit_code == MISUSED
    assert service.calls == []


@pytest.mark.parametrize(
    ("seconds", "shown"), [(-5, "0s"), (59, "59s"), (60, "1m"), (3600, "1h"), (86400 * 3, "3d")]
)
def test_an_age_has_one_unit(seconds: float, shown: str) -> None:
    assert age(seconds) == shown


def test_cancel_all_cancels_what_waits_and_runs(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One at a time here, so that the answers belong to the calls. A task may start between the lists."""
    monkeypatch.setattr(cancel_command, "_THREADS", 1)
    service.will_answer(
        page(named("c"), named("b")),
        page(named("b", "in_progress"), named("a", "in_progress"), named("z", "in_progress")),
        Answer(named("c", "cancelled")),
        Answer(named("b", "completed")),
        Answer(problem("task_not_found", "gone"), 404),
        Answer(named("z", "cancelled")),
    )

    result = invoke(service, "cancel", "--all", "--yes", "--metadata", "user=ann")

    assert (result.exit_code, result.stdout) == (0, "c\nz\n")
    assert result.stderr == "2 cancelled, 2 had ended\n"
    assert [call.path for call in service.calls] == [
        "/v1/tasks?limit=100&status=queued&metadata.user=ann",
        "/v1/tasks?limit=100&status=in_progress&metadata.user=ann",
        *[f"/v1/tasks/{name}/cancel" for name in "cbaz"],
    ]


def test_cancel_all_of_one_status(service: FakeService) -> None:
    service.will_answer(page())

    result = invoke(service, "cancel", "--all", "--status", "in_progress")

    assert (result.exit_code, result.stderr) == (0, "0 cancelled, 0 had ended\n")
    assert len(service.calls) == 1


@pytest.mark.parametrize(("answer", "num_cancelled"), [("y\n", 1), ("n\n", 0), ("\n", 0)])
def test_cancel_all_asks_at_a_terminal(
    service: FakeService, monkeypatch: pytest.MonkeyPatch, answer: str, num_cancelled: int
) -> None:
    monkeypatch.setattr(cancel_command, "is_terminal", lambda: True)
    service.will_answer(page(named("a")), page(), Answer(named("a", "cancelled")))

    result = invoke(service, "cancel", "--all", stdin=answer)

    assert "cancel 1 task?" in result.stderr
    assert result.exit_code == (0 if num_cancelled else FAILED)
    assert len(service.calls) == 2 + num_cancelled


def test_cancel_all_without_a_terminal_needs_yes(service: FakeService) -> None:
    service.will_answer(page(named("b"), named("a")), page())

    result = invoke(service, "cancel", "--all")

    assert result.exit_code == MISUSED
    assert "cancel 2 tasks? Without a terminal to ask, add --yes" in result.stderr
    assert len(service.calls) == 2


@pytest.mark.parametrize(
    "arguments",
    [[], ["t1", "--all"], ["t1", "--status", "queued"], ["--all", "--status", "failed"], ["a/b"], [""]],
)
def test_cancel_wants_an_id_or_all(service: FakeService, arguments: list[str]) -> None:
    assert invoke(service, "cancel", *arguments).exit_code == MISUSED
    assert service.calls == []
