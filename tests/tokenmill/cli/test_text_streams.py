"""The commands with any locale, bytes and pipe: no text is lost and no traceback is printed."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tokenmill.cli.fake_service import Answer, FakeService, finished, task, token
from tokenmill.cli.main import FAILED, MISUSED

ROOT = Path(__file__).parents[3]
EMOJI = "\U0001f600"
Run = Callable[..., "subprocess.CompletedProcess[bytes]"]
pytestmark = pytest.mark.usefixtures("clean_environment")


@pytest.fixture
def run(service: FakeService) -> Run:
    """The command as a process. `env` is added to its environment."""

    def run_one(
        *arguments: str | bytes, env: dict[str, str] | None = None, **options: Any
    ) -> "subprocess.CompletedProcess[bytes]":
        options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, **options}
        if "input" in options:
            del options["stdin"]
        return subprocess.run(
            [sys.executable, "-m", "tokenmill", *arguments, "--url", service.url],
            env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})},
            stderr=subprocess.PIPE,
            check=False,
            **options,
        )

    return run_one


LATIN = {"PYTHONIOENCODING": "latin-1"}


def test_a_text_that_cannot_be_encoded_is_escaped(service: FakeService, run: Run) -> None:
    """shell_gpt#659."""
    service.will_answer(Answer(task("queued"), 202), Answer(task("completed", f"caf\xe9 {EMOJI}")))

    done = run("submit", "--wait", "--choice", EMOJI, "x", env=LATIN)

    assert (done.returncode, done.stdout) == (0, b"caf\xe9 \\U0001f600\n")
    assert done.stderr == b"task t1\n"
    assert service.calls[0].body["structured_outputs"] == {"choice": [EMOJI]}


def test_a_stream_that_cannot_be_encoded_is_escaped(service: FakeService, run: Run) -> None:
    service.will_answer(Answer(task("queued"), 202), Answer([token(0, EMOJI), finished(1, text="!")]))

    done = run("submit", "--stream", "x", env=LATIN)

    assert (done.returncode, done.stdout, done.stderr) == (0, b"\\U0001f600!\n", b"task t1\n")


def test_escaped_json_is_json(service: FakeService, run: Run) -> None:
    service.will_answer(Answer(task("completed", EMOJI)))

    done = run("status", "--json", "t1", env=LATIN)

    assert json.loads(done.stdout.decode("latin-1")) == task("completed", EMOJI)


@pytest.mark.parametrize("locale", ["C", "C.UTF-8", "POSIX"])
@pytest.mark.parametrize("utf8", ["0", "1"])
def test_input_that_is_not_utf8_is_refused_with_its_position(
    service: FakeService, run: Run, locale: str, utf8: str
) -> None:
    """simonw/llm#225."""
    done = run("submit", input=b"caf\xe9", env={"LC_ALL": locale, "PYTHONUTF8": utf8})

    assert done.returncode == MISUSED
    assert b"standard input is not UTF-8 text (byte 4)" in done.stderr
    assert b"Traceback" not in done.stderr
    assert service.calls == []


def test_input_is_utf8_in_every_locale(service: FakeService, run: Run) -> None:
    service.will_answer(Answer(task("queued"), 202))

    done = run("submit", input="caf\xe9\r\n".encode(), env={"LC_ALL": "C", "PYTHONUTF8": "0", **LATIN})

    assert done.returncode == 0
    assert service.calls[0].body == {"prompt": "caf\xe9\n"}


@pytest.mark.parametrize(
    "arguments", [("submit", b"caf\xe9"), ("status", b"caf\xe9"), ("cancel", b"caf\xe9")]
)
def test_an_argument_that_is_not_utf8_is_refused_with_its_position(
    service: FakeService, run: Run, arguments: Any
) -> None:
    done = run(*arguments)

    assert done.returncode == MISUSED
    assert b"the argument 'caf\\\\xe9' is not UTF-8 text (byte 4)" in done.stderr
    assert service.calls == []


def test_a_schema_that_is_not_utf8_is_refused_with_its_position(
    service: FakeService, run: Run, tmp_path: Path
) -> None:
    (tmp_path / "schema.json").write_bytes(b'{"title": "caf\xe9"}')

    done = run("submit", "--json-schema", str(tmp_path / "schema.json"), "x")

    assert done.returncode == MISUSED
    assert b"schema.json is not UTF-8 text (byte 15)" in done.stderr


def test_a_closed_pipe_ends_the_stream_but_not_the_task(service: FakeService, run: Run) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    service.will_answer(Answer(task("queued"), 202), Answer([token(0, "a"), finished(1, text="!")]))

    done = run("submit", "--stream", "x", stdout=writer)
    os.close(writer)

    assert done.returncode == FAILED
    assert done.stderr == b"task t1\n\nthe task continues; to go on: tokenmill watch t1\n"


@pytest.mark.parametrize("flags", [(), ("--wait",), ("--stream",), ("--json",)])
def test_a_failed_write_is_one_line_after_the_id(
    service: FakeService, run: Run, flags: tuple[str, ...]
) -> None:
    following = Answer([finished(0, text="!")]) if "--stream" in flags else Answer(task("completed", "!"))
    service.will_answer(Answer(task("queued"), 202), following)
    with open("/dev/full", "wb") as full:
        done = run("submit", *flags, "x", stdout=full)

    assert done.returncode == FAILED
    message = b"task t1\nError: standard output cannot be written: No space left on device\n"
    assert done.stderr == message


def test_submit_works_without_standard_streams(service: FakeService, run: Run) -> None:
    service.will_answer(Answer(task("queued"), 202), Answer(task("completed", "!")))

    def close_all() -> None:
        for descriptor in range(3):
            os.close(descriptor)

    done = run("submit", "--wait", "x", preexec_fn=close_all)

    assert done.returncode == 0
    assert (done.stdout, done.stderr) == (b"", b"")
    assert len(service.calls) == 2


def test_without_standard_input_a_prompt_is_required(service: FakeService, run: Run) -> None:
    done = run("submit", preexec_fn=lambda: os.close(0))

    assert done.returncode == MISUSED
    assert b"standard input is closed" in done.stderr
