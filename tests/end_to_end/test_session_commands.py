"""`tokenmill chat`, `batch` and `top` at the real service."""

import fcntl
import json
import os
import pty
import re
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.live_service import ROOT, LiveService, wait_for
from tests.tiny_models import save_model
from tokenmill.cli.main import FAILED, MISUSED, UNREACHABLE, main

PROMPT = "the quick brown fox"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    model = save_model(tmp_path_factory.mktemp("model"))
    directory = tmp_path_factory.mktemp("service")
    env = {"TOKENMILL_DTYPE": "float32", "TOKENMILL_FILES_URL": str(directory / "files")}
    with LiveService(model, directory, env) as running:
        yield running


def run(service: LiveService, *arguments: str, standard_input: str | None = None) -> Result:
    return CliRunner().invoke(main, [*arguments, "--url", service.api_url], input=standard_input)


def newest(service: LiveService) -> Any:
    return service.call("GET", "/v1/tasks?limit=1").json["data"][0]


def request_of(service: LiveService, task_id: str) -> Any:
    return service.call("GET", f"/v1/tasks/{task_id}?include=prompt").json["request"]


def read_until(terminal: int, wanted: bytes) -> None:
    """Read what a program writes to its terminal until `wanted` has come."""
    seen = b""
    while wanted not in seen:
        piece = os.read(terminal, 4096)
        assert piece, seen
        seen += piece


class TestChat:
    def test_each_line_of_a_pipe_is_a_message_of_one_conversation(self, service: LiveService) -> None:
        lines = f"{PROMPT}\n\n{PROMPT} again\n"
        result = run(service, "chat", "--system", "Be brief.", "--max-tokens", "4", standard_input=lines)
        assert result.exit_code == 0
        messages = request_of(service, newest(service)["id"])["messages"]
        assert [one["role"] for one in messages] == ["system", "user", "assistant", "user"]
        assert [one["content"] for one in messages[::3]] == ["Be brief.", f"{PROMPT} again"]

    def test_an_answer_that_fails_is_said_and_is_no_part_of_the_conversation(
        self, service: LiveService
    ) -> None:
        late = ["/set timeout_seconds 0.001", PROMPT]
        lines = [*late, "/set timeout_seconds 600", "/set max_tokens 2", PROMPT]
        result = run(service, "chat", standard_input="\n".join(lines))
        assert result.exit_code == 0
        assert "Error: the task failed: not done within timeout_seconds" in result.stderr
        assert len(request_of(service, newest(service)["id"])["messages"]) == 1

    def test_ctrl_c_stops_an_answer_and_ctrl_d_leaves(self, service: LiveService) -> None:
        controller, terminal = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "tokenmill", "chat", "--url", service.api_url, "--max-tokens", "480"],
            stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
            # The terminal becomes that of the new session, whose Ctrl-C is then a signal.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        os.close(terminal)
        try:
            read_until(controller, b"> ")
            os.write(controller, f"/set ignore_eos true\n/set n 1\n{PROMPT}\n".encode())
            wait_for(lambda: newest(service)["status"] == "in_progress", "the answer begins")
            stopped = newest(service)["id"]
            os.write(controller, b"\x03")
            read_until(controller, b"(stopped)")
            assert service.wait_task(stopped)["status"] == "cancelled"
            os.write(controller, b"\x04")
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()
            os.close(controller)

    def test_commands(self, service: LiveService, tmp_path: Path) -> None:
        file = tmp_path / "chat.json"
        lines = [
            "/system Be kind.", "/set max_tokens 2", "/set", "/params", "/nonsense", PROMPT, f"/save {file}",
            "/reset", "/system", PROMPT, "/quit", "never sent",
        ]  # fmt: skip
        result = run(service, "chat", standard_input="\n".join(lines))
        assert result.exit_code == 0
        assert '{"system": "Be kind.", "max_tokens": 2}' in result.stderr
        assert "/nonsense is not a command" in result.stderr
        assert "use /set NAME VALUE" in result.stderr
        saved = json.loads(file.read_text())
        assert [one["role"] for one in saved] == ["user", "assistant"]
        assert [one["role"] for one in request_of(service, newest(service)["id"])["messages"]] == ["user"]

    def test_a_refused_message_is_said_and_the_conversation_continues(self, service: LiveService) -> None:
        lines = f"/set temperature -1\n{PROMPT}\n/set temperature 0\n/set max_tokens 2\n{PROMPT}\n"
        result = run(service, "chat", standard_input=lines)
        assert result.exit_code == 0
        assert "temperature" in result.stderr
        assert len(request_of(service, newest(service)["id"])["messages"]) == 1

    def test_no_service(self, service: LiveService) -> None:
        result = CliRunner().invoke(main, ["chat", "--url", "http://127.0.0.1:1"], input=PROMPT)
        assert result.exit_code == UNREACHABLE


class TestBatch:
    def write(self, folder: Path, *lines: object) -> Path:
        file = folder / "in.jsonl"
        file.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
        return file

    def results(self, output: Path) -> dict[str, Any]:
        found = [json.loads(line) for line in output.read_text().splitlines()]
        assert len({one["custom_id"] for one in found}) == len(found)
        return {one["custom_id"]: one for one in found}

    def test_texts_and_objects(self, service: LiveService, tmp_path: Path) -> None:
        file = self.write(tmp_path, PROMPT, "", {"prompt": PROMPT, "max_tokens": 2}, f"{PROMPT} 3")
        output = tmp_path / "out.jsonl"
        result = run(service, "batch", str(file), "-o", str(output), "--max-tokens", "3")
        assert result.exit_code == 0, result.output
        usages = {
            name: one["response"]["body"]["usage"]["completion_tokens"]
            for name, one in self.results(output).items()
        }
        assert usages == {"0": 3, "1": 2, "2": 3}

    def test_a_second_run_continues_the_batch(self, service: LiveService, tmp_path: Path) -> None:
        file = self.write(tmp_path, *[{"messages": [{"role": "user", "content": f"{n}"}]} for n in range(4)])
        first, second = tmp_path / "1.jsonl", tmp_path / "2.jsonl"
        one = run(service, "batch", str(file), "-o", str(first), "--max-tokens", "2")
        other = run(service, "batch", str(file), "-o", str(second), "--max-tokens", "2")
        assert (one.exit_code, other.exit_code) == (0, 0)
        assert re.findall(r"batch \S+", one.stderr) == re.findall(r"batch \S+", other.stderr)
        assert self.results(first) == self.results(second)

    def test_lines_of_openais_format_keep_their_ids(self, service: LiveService, tmp_path: Path) -> None:
        line = {
            "custom_id": "mine",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": PROMPT, "max_tokens": 2},
        }
        output = tmp_path / "out.jsonl"
        assert run(service, "batch", str(self.write(tmp_path, line)), "-o", str(output)).exit_code == 0
        assert list(self.results(output)) == ["mine"]

    def test_failed_lines_are_counted(self, service: LiveService, tmp_path: Path) -> None:
        bad = {"prompt": PROMPT, "temperature": -1}
        file = self.write(tmp_path, {"prompt": PROMPT, "max_tokens": 1}, bad)
        output = tmp_path / "out.jsonl"
        result = run(service, "batch", str(file), "-o", str(output))
        assert result.exit_code == FAILED
        assert "1 of 2 requests failed" in result.stderr
        assert len(self.results(output)) == 2

    @pytest.mark.parametrize(
        ("lines", "message"),
        [
            ([], "no requests"),
            (["{"], "line 1 is not JSON"),
            ([{"x": 1}], 'line 1 has none of "body"'),
            ([PROMPT, {"messages": []}], "split the file"),
        ],
    )
    def test_files_that_cannot_be_used(
        self, service: LiveService, tmp_path: Path, lines: list[object], message: str
    ) -> None:
        result = run(service, "batch", str(self.write(tmp_path, *lines)), "-o", str(tmp_path / "out.jsonl"))
        assert result.exit_code == MISUSED
        assert message in result.stderr

    def test_no_output_is_overwritten(self, service: LiveService, tmp_path: Path) -> None:
        output = tmp_path / "out.jsonl"
        output.write_text("precious")
        result = run(service, "batch", str(self.write(tmp_path, PROMPT)), "-o", str(output))
        assert result.exit_code == MISUSED
        assert output.read_text() == "precious"


def test_top_prints_the_state_once(service: LiveService) -> None:
    task_id = service.submit(prompt=PROMPT, max_tokens=2)
    service.wait_task(task_id)
    result = run(service, "top", "--once")
    assert result.exit_code == 0
    assert "1 ready workers" in result.stdout
    assert task_id in result.stdout
