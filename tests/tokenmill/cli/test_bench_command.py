"""`tokenmill bench` as a user types it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.tokenmill.bench.scripted_server import Scripted, ScriptedServer, completion, running
from tokenmill.cli.main import main

pytestmark = pytest.mark.usefixtures("clean_environment")
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


def answer(_method: str, path: str, _headers: Any, _body: Any) -> Scripted:
    if path == "/v1/models":
        return Scripted([b'{"data": [{"id": "tiny"}]}'])
    return Scripted(completion(["a", "b"], USAGE))


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["bench", "--backend", "openai", *arguments])


def test_a_report_is_a_table_a_file_of_json_and_a_page(tmp_path: Path) -> None:
    with running(ScriptedServer(answer)) as server:
        result = bench(
            "--url", f"{server.url}/v1", "--requests", "6", "--input-len", "3-5", "--output-len", "2",
            "--goodput", "ttft:60000", "--json", "out.json", "--html", "out.html", "--api-key", "secret",
        )  # fmt: skip
    assert (result.exit_code, result.stderr) == (0, "")
    assert "6 completed, 0 failed" in result.stdout
    assert "100% (ttft 60000 ms)" in result.stdout
    assert "time to first token" in result.stdout
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["model"], found["tokens"]["output"], len(found["per_request"])) == ("tiny", 12, 6)
    assert "<svg" in (tmp_path / "out.html").read_text()
    posts = [call for call in server.calls if call[0] == "POST"]
    assert {call[2]["authorization"] for call in posts} == {"Bearer secret"}
    assert {(call[3]["model"], call[3]["max_tokens"], call[3]["ignore_eos"]) for call in posts} == {
        ("tiny", 2, True)
    }


def test_json_on_standard_output_is_all_that_is_there() -> None:
    with running(ScriptedServer(answer)) as server:
        result = bench("--url", server.url, "--requests", "2", "--json", "-", "--body", '{"top_k": 3}')
    assert json.loads(result.stdout)["requests"]["completed"] == 2
    assert server.calls[-1][3]["top_k"] == 3


def test_prompts_from_a_file_end_where_the_model_ends_them(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("one\ntwo\n")
    with running(ScriptedServer(answer)) as server:
        bench("--url", server.url, "--requests", "2", "--prompts", "prompts", "--concurrency", "1")
    posts = [call[3] for call in server.calls if call[0] == "POST"]
    assert [body["prompt"] for body in posts] == ["one", "two"]
    assert all("ignore_eos" not in body for body in posts)


def test_a_load_of_which_nothing_completes_has_failed() -> None:
    def refuse(_method: str, path: str, *_: Any) -> Scripted:
        return answer("GET", path, None, None) if path == "/v1/models" else Scripted([b"no"], "500 Error")

    with running(ScriptedServer(refuse)) as server:
        result = bench("--url", server.url, "--requests", "2")
    assert result.exit_code == 1
    assert "HTTP 500" in result.stdout
    assert result.stderr == "Error: no request completed\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--input-len", "9-3"), "16-256"),
        (("--goodput", "speed:3"), "ttft, tpot, e2el"),
        (("--goodput", "ttft"), "ttft:500"),
        (("--body", "[1]"), "not a JSON object"),
        (("--prompts", "none"), "does not exist"),
        (("--rate", "0"), "--rate"),
    ],
)
def test_flags_that_cannot_be_used_are_refused(arguments: tuple[str, ...], words: str) -> None:
    result = bench("--url", "http://127.0.0.1:9", *arguments)
    assert result.exit_code == 2
    assert words in result.stderr


def test_a_server_that_does_not_answer_is_named() -> None:
    result = bench("--url", "http://127.0.0.1:9")
    assert result.exit_code == 4
    assert "no server answers at http://127.0.0.1:9" in result.stderr


def test_a_server_that_wants_a_key_is_told_in_flags() -> None:
    with running(ScriptedServer(lambda *_: Scripted([b"{}"], "401 Unauthorized"))) as server:
        result = bench("--url", server.url)
    assert result.exit_code == 1
    assert "--api-key" in result.stderr


def test_the_first_interrupt_ends_the_load_and_keeps_its_report(tmp_path: Path) -> None:
    count = 0

    def interrupt_at_the_fifth(method: str, path: str, headers: Any, body: Any) -> Scripted:
        nonlocal count
        count += method == "POST"
        if count == 5:
            process.send_signal(signal.SIGINT)
        return answer(method, path, headers, body)

    with running(ScriptedServer(interrupt_at_the_fifth)) as server:
        command = [sys.executable, "-m", "tokenmill", "bench", "--backend", "openai", "--duration", "300"]
        process = subprocess.Popen(
            [*command, "--url", server.url, "--concurrency", "1", "--json", "out.json"],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130, stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["interrupted"]
    assert found["requests"]["completed"] >= 4
