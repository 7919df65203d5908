"""`tokenmill serve` with the real worker and API and a tiny model."""

import io
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.live_service import http, wait_for
from tests.tiny_models import save_model
from tests.tokenmill.serve.children import TIMEOUT_SECONDS
from tests.tokenmill.serve.served import REAL, ROOT, Served
from tokenmill.cli.main import MISUSED
from tokenmill.client.streams import TokenStream
from tokenmill.client.sync_client import Client
from tokenmill.protocol import keys
from tokenmill.protocol.messages import Event

#: Long enough to be running still when the worker is halted after its first tokens.
LONG: dict[str, Any] = {
    "prompt": "the quick brown fox",
    "max_tokens": 1500,
    "temperature": 0,
    "ignore_eos": True,
}
SHORT: dict[str, Any] = {**LONG, "max_tokens": 12}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def serve(model: Path, tmp_path: Path) -> Iterator[Callable[..., Served]]:
    runs: list[Served] = []

    def start(**settings: str) -> Served:
        settings = {"TOKENMILL_MODEL": str(model), "TOKENMILL_GRACE_SECONDS": "0", **settings}
        runs.append(Served(tmp_path, REAL, settings))
        return runs[-1].wait_until_ready()

    yield start
    for served in runs:
        served.end()


def command(served: Served, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `tokenmill` in the directory of the service."""
    return subprocess.run(
        [sys.executable, "-c", REAL, *arguments],
        cwd=served.state.path.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@contextmanager
def halted_worker(served: Served) -> Iterator[None]:
    """Its task cannot end meanwhile."""
    worker = served.state.processes()["worker"].pid
    os.kill(worker, signal.SIGSTOP)
    yield
    os.kill(worker, signal.SIGCONT)


def redis_url(served: Served) -> str:
    url = served.state.address("redis-url")
    assert url is not None
    return url


def has_open_stream(served: Served) -> bool:
    text = http("GET", f"{served.url}/metrics").body.decode()
    return "\ntokenmill_http_streams_open 1.0\n" in text


def documented_readers() -> list[str]:
    """The stream readers in the page about the token stream, as they are written there."""
    parts = (ROOT / "docs" / "token-stream.md").read_text("utf-8").split("```python\n")[1:]
    return [block for block in (part.split("```")[0] for part in parts) if "redis_url" in block]


def printed_by(code: str, **names: str) -> str:
    output = io.StringIO()
    with redirect_stdout(output):
        exec(code, dict(names))
    return output.getvalue()


Connect = Callable[[str], Client]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Creates clients, which are closed after the test."""
    with ExitStack() as stack:
        yield lambda url: stack.enter_context(Client(url))


def joined(events: list[Event]) -> str:
    return "".join(event.text for event in events)


def test_a_start_prints_at_most_ten_lines(serve: Callable[..., Served], tmp_path: Path) -> None:
    """The first start, which also compiles the native operators."""
    served = serve(TOKENMILL_CACHE_DIR=str(tmp_path / "cache"))

    lines = served.text()
    assert [line for line in lines if "compiling the native operators" in line]
    assert len(lines) <= 10, lines


def test_submit_poll_stream_and_cancel(serve: Callable[..., Served], connect: Connect) -> None:
    served = serve()
    client = connect(served.url)

    done = client.wait(client.submit(**SHORT).id)
    assert done.status == "completed"
    text = done.text
    assert joined(list(TokenStream(redis_url(served), done.id))) == text
    assert joined(list(client.stream(done.id))) == text

    readers = documented_readers()
    assert len(readers) == 2
    for code in readers:
        assert printed_by(code, redis_url=redis_url(served), task_id=done.id) == text
        live = client.submit(**SHORT).id
        assert printed_by(code, redis_url=redis_url(served), task_id=live) == text

    # The commands find the service by its directory.
    flags = ["--max-tokens", "12", "--temperature", "0", "the quick brown fox"]
    streamed = command(served, "submit", "--stream", *flags)
    assert streamed.returncode == 0
    assert re.fullmatch(r"task [0-9a-f]{32}\n", streamed.stderr)
    assert command(served, "submit", "--wait", *flags).stdout == streamed.stdout

    running = client.submit(**LONG).id
    next(iter(TokenStream(redis_url(served), running)))
    with halted_worker(served):
        assert command(served, "cancel", running).stdout == "cancelled\n"
    shown = command(served, "status", running)
    assert shown.returncode == 0
    assert "cancelled" in shown.stdout


def test_an_interrupted_task_resumes_at_the_next_start(
    serve: Callable[..., Served], connect: Connect
) -> None:
    first = serve()
    client = connect(first.url)
    task_id = client.submit(**LONG).id
    before = list(itertools.islice(TokenStream(redis_url(first), task_id), 20))

    with halted_worker(first):
        first.signal(signal.SIGINT)
        first.lines.wait_for("api has stopped")

    assert first.wait() == 0
    order = ["api has stopped", "worker has stopped", "redis has stopped"]
    stopped = [line.split("| ")[-1] for line in first.text() if line.endswith("has stopped")]
    assert stopped == order, "\n".join(first.text())

    second = serve()
    client = connect(second.url)
    done = client.wait(task_id)
    assert done.status == "completed", done
    assert done.usage is not None
    assert done.usage.completion_tokens == LONG["max_tokens"]

    events = list(TokenStream(redis_url(second), task_id))
    assert [event.seq for event in events] == list(range(len(events)))
    assert events[: len(before)] == before
    with redis.Redis.from_url(redis_url(second)) as store:
        assert store.hget(keys.run(task_id), "attempt") == b"2"
    assert joined(events) == done.text


def test_a_second_request_to_stop_does_not_wait_and_loses_nothing(
    serve: Callable[..., Served], connect: Connect
) -> None:
    """The grace period is longer than the test."""
    first = serve(TOKENMILL_GRACE_SECONDS="900")
    client = connect(first.url)
    tasks = [client.submit(**LONG).id for _ in range(64)]
    next(iter(TokenStream(redis_url(first), tasks[0])))

    first.signal(signal.SIGINT)
    first.lines.wait_for("waiting for the worker, which finishes tasks for up to TOKENMILL_GRACE_SECONDS")
    first.signal(signal.SIGINT)

    assert first.wait() == 0
    assert any("stopping now" in line and "SIGTERM" in line for line in first.text())
    client = connect(serve().url)
    for task_id in tasks[1:]:
        assert client.cancel(task_id).status in ("completed", "cancelled")
    assert client.wait(tasks[0]).status == "completed"


def test_streams_survive_a_killed_api(serve: Callable[..., Served], connect: Connect) -> None:
    """With a stream and a poll open, whose threads must not keep the port."""
    served = serve(TOKENMILL_HTTP_GRACE_SECONDS="600")
    client = connect(served.url)
    task_id = client.submit(**LONG).id
    events: list[Event] = []
    reader = threading.Thread(target=lambda: events.extend(client.stream(task_id)), daemon=True)
    waited: list[str] = []
    waiter = threading.Thread(target=lambda: waited.append(client.wait(task_id).status), daemon=True)
    with halted_worker(served):
        waiter.start()
        reader.start()
        wait_for(lambda: has_open_stream(served), "a stream is open, after a poll")
        os.kill(served.state.processes()["api"].pid, signal.SIGKILL)
        served.lines.wait_for("the api was ended by SIGKILL; starting it again")

    reader.join(TIMEOUT_SECONDS)
    waiter.join(TIMEOUT_SECONDS)
    assert waited == ["completed"], "\n".join(served.text())
    assert [event.seq for event in events] == list(range(len(events)))
    assert joined(events) == client.get(task_id).text
    assert sum("the api " in line for line in served.text()) == 1


def test_a_run_after_a_killed_supervisor_resumes_its_tasks(
    serve: Callable[..., Served], connect: Connect
) -> None:
    """Its processes have many threads here, and hold the lock for a moment after they die."""
    first = serve()
    task_id = connect(first.url).submit(**LONG).id
    first.process.kill()
    first.process.wait()

    second = serve()

    assert connect(second.url).wait(task_id).status == "completed"


def test_a_model_that_cannot_be_served_is_reported_last(tmp_path: Path) -> None:
    served = Served(tmp_path, REAL, {"TOKENMILL_MODEL": str(tmp_path / "nothing")})

    assert served.wait() == MISUSED
    last_line = served.text()[-1]
    assert last_line.startswith("Error: the worker ended with exit code 78; its last line: ")
    assert str(tmp_path / "nothing") in last_line
