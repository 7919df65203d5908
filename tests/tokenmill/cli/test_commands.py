"""The command as a user types it: results on standard output, one line for an error, exit codes."""

import json
import os
from typing import Any

import pytest
from click.testing import CliRunner, Result

from api.schemas.requests import TaskBody
from tests.conftest import free_port
from tests.tokenmill.cli.fake_service import Answer, FakeService, finished, problem, task, token
from tests.tokenmill.client.either_client import Clock
from tokenmill.cli import main as cli
from tokenmill.cli.main import FAILED, MISUSED, REFUSED, UNREACHABLE
from tokenmill.cli.request_flags import to_body
from tokenmill.cli.task_commands import submit
from tokenmill.client.sync_client import Client

pytestmark = pytest.mark.usefixtures("clean_environment")


def invoke(*arguments: str, stdin: str | None = None, environ: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(cli.main, arguments, input=stdin, env=environ)


def invoke_at(service: FakeService, *arguments: str, stdin: str | None = None) -> Result:
    return invoke(*arguments, "--url", service.url, stdin=stdin)


def test_submit_prints_the_id_alone(service: FakeService) -> None:
    service.will_answer(Answer(task("queued"), 202))

    result = invoke_at(service, "submit", "Once upon a time")

    assert (result.exit_code, result.stdout, result.stderr) == (0, "t1\n", "task t1\n")
    assert service.calls[0].body == {"prompt": "Once upon a time"}


def test_submit_sends_the_fields_that_are_set(service: FakeService) -> None:
    service.will_answer(Answer(task("queued"), 202))

    invoke_at(
        service, "submit", "--chat", "--max-tokens", "5", "--temperature", "0", "--stop", "a", "--stop", "b",
        "--seed", "0", "--priority", "1", "--model", "tiny", "hi",
    )  # fmt: skip

    assert service.calls[0].body == {
        "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0.0,
        "stop": ["a", "b"], "seed": 0, "priority": 1, "model": "tiny",
    }  # fmt: skip


@pytest.mark.parametrize("command", [("submit", "hi"), ("status", "t1"), ("cancel", "t1")])
def test_a_key_is_a_flag_or_a_variable(service: FakeService, command: tuple[str, ...]) -> None:
    service.will_answer(*[Answer(task("queued"), 202)] * 2)

    invoke_at(service, *command, "--api-key", "one")
    invoke(*command, "--url", service.url, environ={"TOKENMILL_API_KEY": "two"})

    assert [call.headers["authorization"] for call in service.calls] == ["Bearer one", "Bearer two"]


@pytest.mark.parametrize("key", ["a-secret with-more", "a-secret\nX-More: 1", "a-secret-\u20ac"])
def test_a_malformed_key_is_not_repeated(service: FakeService, key: str) -> None:
    done = invoke_at(service, "status", "t1", "--api-key", key)

    assert done.exit_code == 2
    assert "api_key must be" in done.stderr
    assert "secret" not in done.output + done.stderr
    assert service.calls == []


@pytest.mark.parametrize("arguments", [(), ("-",)])
def test_submit_reads_standard_input(service: FakeService, arguments: tuple[str, ...]) -> None:
    service.will_answer(Answer(task("queued"), 202))

    invoke_at(service, "submit", *arguments, stdin="from a pipe\n")

    assert service.calls[0].body == {"prompt": "from a pipe\n"}


def test_submit_wait_prints_the_text(service: FakeService) -> None:
    service.will_answer(Answer(task("queued"), 202), Answer(task("completed", "Paris.")))

    assert invoke_at(service, "submit", "--wait", "x").stdout == "Paris.\n"


def test_submit_stream_prints_the_text(service: FakeService) -> None:
    service.will_answer(
        Answer(task("queued"), 202), Answer([token(0, "Pa"), token(1, "ris"), finished(2, text=".")])
    )

    result = invoke_at(service, "submit", "--stream", "x")

    assert (result.exit_code, result.stdout) == (0, "Paris.\n")


def test_a_failed_stream_is_reported(service: FakeService) -> None:
    error = {"message": "the prompt has 9 tokens", "code": "prompt_too_long"}
    service.will_answer(Answer(task("queued"), 202), Answer([token(0, "Pa"), finished(1, "error", error)]))

    result = invoke_at(service, "submit", "--stream", "x")

    assert result.exit_code == FAILED
    assert result.stdout == "Pa\n"
    assert result.stderr == "task t1\nError: the task failed: the prompt has 9 tokens (prompt_too_long)\n"


@pytest.mark.parametrize("status", ["failed", "cancelled"])
def test_a_task_that_did_not_complete_is_a_failure(service: FakeService, status: str) -> None:
    service.will_answer(Answer(task("queued"), 202), Answer(task(status, "Par")))

    result = invoke_at(service, "submit", "--wait", "x")

    assert (result.exit_code, result.stdout) == (FAILED, "Par\n")
    assert result.stderr == f"task t1\nError: the task ended as {status}\n"


def test_stream_and_wait_exclude_each_other(service: FakeService) -> None:
    result = invoke_at(service, "submit", "--stream", "--wait", "x")

    assert result.exit_code == MISUSED
    assert service.calls == []


def test_a_refusal_is_one_line(service: FakeService) -> None:
    service.will_answer(Answer(problem("invalid_value", "temperature: must be 0 or more"), 400))

    result = invoke_at(service, "submit", "--temperature", "-1", "x")

    assert result.exit_code == REFUSED
    assert result.stderr == "Error: temperature: must be 0 or more\n"


@pytest.mark.parametrize("url", ["foo", "127.0.0.1:8000", "ftp://127.0.0.1", "http://", "http://host:port"])
def test_a_malformed_address_is_a_wrong_setting(url: str) -> None:
    result = invoke("submit", "--url", url, "x")

    assert result.exit_code == MISUSED
    assert result.stderr == (
        "Error: --url must be an address that starts with http:// or https://,"
        f" such as http://127.0.0.1:8000, not '{url}'\n"
    )


def test_no_service_is_one_line() -> None:
    url = f"http://127.0.0.1:{free_port()}"

    result = invoke("submit", "--url", url, "x")

    assert result.exit_code == UNREACHABLE
    assert result.stderr.startswith(f"Error: Tokenmill does not answer at {url}; is it running?")
    assert result.stderr.count("\n") == 1


def test_status_shows_the_fields(service: FakeService) -> None:
    queue = {"position": 3, "tokens_ahead": 812, "eta_seconds": 12.5, "waiting_for": "capacity"}
    service.will_answer(Answer(task("queued", queue=queue)))

    lines = invoke_at(service, "status", "t1").stdout.splitlines()

    assert [line.split(maxsplit=1)[0] for line in lines] == [
        "id", "status", "model", "position", "tokens", "eta", "waiting", "tokens", "queue",
    ]  # fmt: skip
    assert "capacity" in lines[6]


def test_status_as_json_is_the_task(service: FakeService) -> None:
    service.will_answer(Answer(task("completed", "Zürich")))

    assert json.loads(invoke_at(service, "status", "--json", "t1").stdout) == task("completed", "Zürich")


def test_status_can_wait(service: FakeService) -> None:
    service.will_answer(Answer(task("in_progress")), Answer(task("failed")))

    assert invoke_at(service, "status", "--wait", "t1").exit_code == FAILED


def test_status_of_a_failed_task_succeeds(service: FakeService) -> None:
    service.will_answer(Answer(task("failed", error={"message": "m", "code": "c"})))

    result = invoke_at(service, "status", "t1")

    assert result.exit_code == 0
    assert "m (c)" in result.stdout


def test_cancel_prints_the_state(service: FakeService) -> None:
    service.will_answer(Answer(task("cancelled")))

    assert invoke_at(service, "cancel", "t1").stdout == "cancelled\n"
    assert (service.calls[0].method, service.calls[0].path) == ("POST", "/v1/tasks/t1/cancel")


@pytest.mark.parametrize("command", ["status", "cancel"])
@pytest.mark.parametrize("task_id", ["", " ", "a/b"])
def test_a_malformed_id_is_wrong_usage(service: FakeService, command: str, task_id: str) -> None:
    result = invoke_at(service, command, task_id)

    assert result.exit_code == MISUSED
    assert f"{task_id!r} is not the id of a task" in result.stderr
    assert service.calls == []


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "missing_api_key",
            "the service asks for an API key; give it with --api-key or TOKENMILL_API_KEY",
        ),
        (
            "invalid_api_key",
            "the service does not know this API key; check --api-key or TOKENMILL_API_KEY",
        ),
    ],
)
def test_a_refused_key_is_reported_in_the_words_of_the_command(
    service: FakeService, code: str, words: str
) -> None:
    service.will_answer(Answer(problem(code, "send `Authorization: Bearer <key>`"), 401))

    result = invoke_at(service, "submit", "x")

    assert (result.exit_code, result.stderr) == (REFUSED, f"Error: {words}\n")


@pytest.mark.parametrize(
    ("param", "flag"),
    [
        ("max_tokens", "--max-tokens"),
        ("n", "--n"),
        ("stop.0", "--stop"),
        ("timeout_seconds", "--timeout"),
        ("messages.0.content", "messages.0.content"),
    ],
)
def test_a_wrong_field_is_reported_by_its_flag(service: FakeService, param: str, flag: str) -> None:
    body = problem("invalid_value", f"{param}: must be 1 or more")
    body["error"]["param"] = param
    service.will_answer(Answer(body, 400))

    assert invoke_at(service, "submit", "x").stderr == f"Error: {flag}: must be 1 or more\n"


def test_a_full_queue_says_when_to_try_again(service: FakeService) -> None:
    service.will_answer(Answer(problem("queue_full", "the queue is full"), 429, {"Retry-After": "7"}))

    assert invoke_at(service, "submit", "x").stderr == "Error: the queue is full (in about 7 s)\n"
    assert len(service.calls) == 1


def test_a_submission_without_a_reply_is_repeated(service: FakeService) -> None:
    service.will_answer(Answer(task("queued"), 202, breaks=True), Answer(task("queued"), 202))

    assert invoke_at(service, "submit", "x").stdout == "t1\n"
    assert len({call.headers["idempotency-key"] for call in service.calls}) == 1


def test_the_id_is_on_standard_error_in_every_mode(service: FakeService) -> None:
    for flags in ([], ["--json"], ["--wait"], ["--wait", "--json"], ["--stream"]):
        end = Answer([finished(0)]) if "--stream" in flags else Answer(task("completed"))
        service.will_answer(Answer(task("queued"), 202), *[end] * bool({"--wait", "--stream"} & {*flags}))

        assert invoke_at(service, "submit", *flags, "x").stderr == "task t1\n", flags


def test_a_stream_whose_service_stops_says_how_to_go_on(
    service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(Client, "_sleep", staticmethod(clock.sleep))
    monkeypatch.setattr(Client, "_clock", staticmethod(clock))
    away = Answer(problem("store_unavailable", "Redis does not answer"), 503)
    service.will_answer(Answer(task("queued"), 202), Answer([token(0, "Pa")]), *[away] * 50)

    result = invoke_at(service, "submit", "--stream", "x")

    assert (result.exit_code, result.stdout) == (REFUSED, "Pa")
    assert result.stderr.splitlines() == [
        "task t1",
        "",
        "the task continues; to go on: tokenmill watch t1",
        "Error: Redis does not answer",
    ]


@pytest.mark.parametrize(
    "command", [(), ("serve",), ("worker",), ("api",), ("submit",), ("status",), ("cancel",)]
)
def test_every_help_has_examples(command: tuple[str, ...]) -> None:
    result = invoke(*command, "--help")

    assert result.exit_code == 0
    assert "Examples:" in result.stdout


def test_the_exit_codes_are_documented() -> None:
    text = invoke("--help").stdout

    for code in (FAILED, MISUSED, REFUSED, UNREACHABLE, cli.INTERRUPTED):
        assert f"\n    {code} " in text


def test_the_address_comes_from_flag_environment_or_file(service: FakeService, tmp_path: Any) -> None:
    (tmp_path / "tokenmill.toml").write_text(f'url = "{service.url}"\n')
    service.will_answer(*[Answer(task("queued"))] * 2)

    assert invoke("status", "t1").exit_code == 0
    assert invoke("status", "t1", environ={"TOKENMILL_URL": service.url}).exit_code == 0
    assert invoke("status", "t1", environ={"TOKENMILL_URL": f"http://127.0.0.1:{free_port()}"}).exit_code == 4


def test_a_wrong_setting_is_one_line() -> None:
    result = invoke("worker", "--max-num-seqs", "many")

    assert result.exit_code == MISUSED
    message = "Error: --max-num-seqs must be a whole number from 1 to 2147483647, not 'many'\n"
    assert result.stderr == message


@pytest.mark.parametrize("name", ["worker", "api"])
def test_flags_become_the_environment_of_the_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[tuple[tuple[str, ...], dict[str, str]]] = []
    monkeypatch.setattr(os, "execve", lambda _, command, environ: started.append((command, environ)))

    result = invoke(
        name, "--model", "m", "--redis-url", "redis://h:1/0", environ={"TOKENMILL_MODEL": "other"}
    )

    assert result.exit_code == 0
    command, environ = started[0]
    assert command[1:] == ("-P", "-m", name)
    assert (environ["TOKENMILL_MODEL"], environ["REDIS_URL"]) == ("m", "redis://h:1/0")


def test_submit_has_flags_for_structured_outputs(service: FakeService, tmp_path: Any) -> None:
    service.will_answer(*[Answer(task("queued"), 202)] * 3)
    (tmp_path / "schema.json").write_text('{"type": "object"}')

    invoke_at(
        service, "submit", "-n", "3", "--min-tokens", "2", "--presence-penalty", "0.5", "--frequency-penalty",
        "0.25", "--repetition-penalty", "1.1", "--timeout", "60", "--queue-timeout", "5", "--ttft-timeout",
        "7.5", "--choice", "a", "--choice", "b", "x",
    )  # fmt: skip
    invoke_at(service, "submit", "--json-schema", str(tmp_path / "schema.json"), "x")
    invoke_at(service, "submit", "--regex", "a+", "x")

    assert service.calls[0].body == {
        "prompt": "x", "n": 3, "min_tokens": 2, "presence_penalty": 0.5, "frequency_penalty": 0.25,
        "repetition_penalty": 1.1, "timeout_seconds": 60.0, "queue_timeout_seconds": 5.0,
        "ttft_timeout_seconds": 7.5, "structured_outputs": {"choice": ["a", "b"]},
    }  # fmt: skip
    shapes = [call.body["structured_outputs"] for call in service.calls[1:]]
    assert shapes == [{"json": '{"type": "object"}'}, {"regex": "a+"}]


def test_structured_outputs_exclude_each_other(service: FakeService) -> None:
    result = invoke_at(service, "submit", "--regex", "a", "--choice", "b", "x")

    assert result.exit_code == MISUSED
    assert "one of --json-schema, --regex and --choice" in result.stderr
    assert service.calls == []


def test_every_flag_of_a_request_is_a_field_of_a_task() -> None:
    own = {"prompt", "stream", "wait", "as_json", "config_file", "url", "api_key", "json_schema", "choice"}
    flags = {str(flag.name): "set" for flag in submit.params if flag.name not in own}

    assert set(to_body("x", flags)) <= set(TaskBody.model_fields)


def test_several_outputs_have_headings(service: FakeService) -> None:
    outputs = [{"index": 0, "text": "Paris."}, {"index": 1, "text": "London."}]
    ended = {**task("completed"), "outputs": outputs}
    service.will_answer(Answer(task("queued"), 202), Answer(ended))

    shown = invoke_at(service, "submit", "--wait", "-n", "2", "x").stdout

    assert shown == "--- output 0 ---\nParis.\n\n--- output 1 ---\nLondon.\n"


def test_a_stream_of_several_outputs_shows_one_after_the_other(service: FakeService) -> None:
    frames = [
        token(0, "Pa"), token(1, "Lon", index=1), token(2, "ris"), token(3, "don", index=1),
        finished(4, text=".", index=1, done=False), finished(5, text="!"),
    ]  # fmt: skip
    service.will_answer(Answer(task("queued"), 202), Answer(frames))

    result = invoke_at(service, "submit", "--stream", "-n", "2", "x")

    assert result.exit_code == 0
    assert result.stdout == "--- output 0 ---\nParis!\n\n--- output 1 ---\nLondon.\n"


def test_one_failed_output_of_several_is_a_failure(service: FakeService) -> None:
    error = {"message": "not finite", "code": "engine_error"}
    frames = [finished(0, "error", error, index=1, done=False), finished(1, error=error)]
    service.will_answer(Answer(task("queued"), 202), Answer(frames))

    result = invoke_at(service, "submit", "--stream", "-n", "2", "x")

    assert (result.exit_code, "engine_error" in result.stderr) == (FAILED, True)
