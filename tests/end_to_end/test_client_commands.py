"""The commands that call the real service: streams that are interrupted or bridge a restart."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.live_service import LiveService, wait_for
from tests.tiny_models import save_model
from tokenmill.client import Client

#: Long enough to be running still when the worker is halted after its first tokens.
LONG = ["--min-tokens", "1500", "--max-tokens", "1500", "--temperature", "0", "the quick brown fox"]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    model = save_model(tmp_path_factory.mktemp("model"))
    with LiveService(model, tmp_path_factory.mktemp("service"), {"TOKENMILL_DTYPE": "float32"}) as running:
        yield running


def start(service: LiveService, *arguments: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "tokenmill", *arguments, "--url", service.api_url]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)


@contextmanager
def halted_worker(service: LiveService) -> Iterator[None]:
    pid = service.worker.popen.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def beginning(process: "subprocess.Popen[bytes]") -> bytes:
    """The first output, once there is some."""
    assert process.stdout is not None
    return process.stdout.read(1)


def test_an_interrupted_stream_is_shown_by_the_command_that_it_prints(service: LiveService) -> None:
    process = start(service, "submit", "--stream", *LONG)
    text = beginning(process)
    with halted_worker(service):
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate()
    assert process.returncode == 130
    first, *_, last = errors.decode().splitlines()
    task_id = first.removeprefix("task ")
    assert last == f"the task continues; to go on: tokenmill watch {task_id}"

    watched, errors = start(service, "watch", task_id).communicate()

    with Client(service.api_url) as client:
        done = client.result(task_id)
    assert watched.decode() == done.text + "\n"
    assert watched.startswith(text + rest)
    assert errors.decode().startswith(f"task {task_id}: completed, ")


def test_a_stream_bridges_a_restart_of_the_api(service: LiveService, tmp_path: Path) -> None:
    process = start(service, "submit", "--stream", *LONG)
    text = beginning(process)
    with halted_worker(service):
        service.restart_api()
        assert service.api is not None
        wait_for(service.api.is_ready, "the new API answers")
    rest, errors = process.communicate()

    task_id = errors.decode().splitlines()[0].removeprefix("task ")
    with Client(service.api_url) as client:
        assert (text + rest).decode() == client.result(task_id).text + "\n"
    assert process.returncode == 0


def test_an_ended_task_is_watched_from_its_beginning(service: LiveService) -> None:
    with Client(service.api_url) as client:
        done = client.submit("the quick brown fox", max_tokens=8, temperature=0, ignore_eos=True).result()

    output, errors = start(service, "watch", done.id).communicate()

    assert output.decode() == done.text + "\n"
    assert errors.decode().startswith(f"task {done.id}: completed, ")
