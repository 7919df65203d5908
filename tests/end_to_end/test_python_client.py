"""The Python clients at the real service: tasks, streams across restarts of the API, lists, and errors."""

import itertools
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.live_service import ROOT, LiveService
from tests.tiny_models import save_model
from tests.tokenmill.client.either_client import BlockingClient, Clock, sync_client
from tokenmill.client import (
    Client,
    Expired,
    FinishedEvent,
    InvalidRequest,
    NotAuthenticated,
    NotCompleted,
    NotFound,
    TooManyRequests,
    Unreachable,
)
from tokenmill.protocol import naming

KEY = "client-key"
PROMPT = "the quick brown fox"
#: Long enough to be running still when the worker is halted after its first tokens.
LONG: dict[str, Any] = {"max_tokens": 1500, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def service(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    settings = {
        "TOKENMILL_DTYPE": "float32",
        "TOKENMILL_MAX_NUM_SEQS": "4",
        "TOKENMILL_MAX_WAITING_TASKS": "8",
        "TOKENMILL_API_KEYS": f"tests:{KEY}",
    }
    with LiveService(model_dir, tmp_path_factory.mktemp("service"), settings) as running:
        yield running


@pytest.fixture(params=["sync", "async"])
def connect(request: pytest.FixtureRequest, service: LiveService) -> Iterator[Callable[..., Any]]:
    """Creates a client of the service, which is closed after the test."""
    create: Any = sync_client if request.param == "sync" else BlockingClient
    with ExitStack() as stack:

        def start(key: str = KEY, clock: Clock | None = None, url: str | None = None, **options: Any) -> Any:
            return stack.enter_context(create(clock, url or service.api_url, key, **options))

        yield start


@contextmanager
def halted_worker(service: LiveService) -> Iterator[None]:
    pid = service.worker.popen.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_task_from_submission_to_result(connect: Callable[..., Any]) -> None:
    client = connect()
    assert client.is_ready()
    (model,) = client.models()

    submitted = client.submit(
        messages=[{"role": "user", "content": "hi"}], model=model.id, max_tokens=8, temperature=0, n=2,
        logprobs=1, ignore_eos=True, metadata={"user": "ann"},
    )  # fmt: skip
    done = submitted.result()

    assert [len(output.token_ids) for output in done.outputs] == [8, 8]
    assert done.outputs[0].logprobs[0].top[0].logprob <= 0
    assert done.usage.completion_tokens == 16
    assert done.metadata == {"user": "ann"}
    events = list(submitted.stream())
    assert [event.seq for event in events] == list(range(18))
    assert "".join(event.text for event in events if event.index == 1) == done.texts[1]
    assert isinstance(events[-1], FinishedEvent)
    assert list(submitted.stream(after=events[-1].seq)) == []


def test_a_submission_with_the_same_key_is_the_same_task(connect: Callable[..., Any]) -> None:
    client = connect()

    first, second = (client.submit(PROMPT, max_tokens=1, idempotency_key="once") for _ in range(2))

    assert first.id == second.id


def test_a_stream_survives_killed_apis(service: LiveService, connect: Callable[..., Any]) -> None:
    """No token is lost or doubled, and a wait that is open bridges the outage too."""
    client = connect()
    submitted = client.submit(PROMPT, **LONG)
    stream = submitted.stream()
    events = list(itertools.islice(stream, 3))

    with halted_worker(service):
        assert submitted.refresh().status == "in_progress"
        service.restart_api()
    events += itertools.islice(stream, 100)
    service.restart_api()
    done = submitted.wait()
    events += stream

    assert done.status == "completed"
    assert [event.seq for event in events] == list(range(LONG["max_tokens"] + 1))
    assert "".join(event.text for event in events) == done.text


def test_a_cancelled_task_has_no_result(service: LiveService, connect: Callable[..., Any]) -> None:
    client = connect()
    submitted = client.submit(PROMPT, **LONG)
    next(submitted.stream())

    with halted_worker(service):
        assert submitted.cancel().status == "cancelled"

    with pytest.raises(NotCompleted, match="cancelled") as raised:
        submitted.result()
    assert raised.value.task.text


def test_a_full_queue_is_retried_after_the_time_it_asks_for(
    service: LiveService, connect: Callable[..., Any]
) -> None:
    """The worker is halted until the client pauses for the Retry-After of the refusal."""
    waiting: list[str] = []
    with ExitStack() as stack:
        other = stack.enter_context(Client(service.api_url, KEY, max_retries=0))
        worker = stack.enter_context(ExitStack())
        worker.enter_context(halted_worker(service))

        def resume() -> None:
            worker.close()
            for task_id in waiting:
                other.wait(task_id)

        refusal = refused_submission(other, waiting)
        clock = Clock(on_pause=resume)
        submitted = connect(clock=clock, max_retries=1).submit(PROMPT, max_tokens=4)

        assert (refusal.code, len(clock.slept)) == ("queue_full", 1)
        assert refusal.retry_after is not None
        assert clock.slept[0] >= 1
        assert other.result(submitted.id).text


def refused_submission(client: Client, accepted: list[str]) -> TooManyRequests:
    """Submit tasks until one is refused."""
    while True:
        try:
            accepted.append(client.submit(PROMPT, max_tokens=4).id)
        except TooManyRequests as refusal:
            return refusal


def test_errors_of_the_service_are_typed(connect: Callable[..., Any]) -> None:
    client = connect()
    with pytest.raises(InvalidRequest, match="temperature") as invalid:
        client.submit(PROMPT, temperature=-1)
    assert (invalid.value.param, invalid.value.status) == ("temperature", 400)
    with pytest.raises(InvalidRequest, match="unknown field"):
        client.submit(PROMPT, weather="sunny")
    with pytest.raises(NotFound) as unknown:
        client.get(naming.new_task_id())
    assert unknown.value.code == "task_not_found"
    with pytest.raises(NotFound):
        list(client.stream(naming.new_task_id()))
    with pytest.raises(Expired) as expired:
        client.wait(naming.new_task_id(time.time() - 90_000))
    assert expired.value.code == "task_expired"
    for key, code in (("wrong", "invalid_api_key"), ("", "missing_api_key")):
        with pytest.raises(NotAuthenticated) as refused:
            connect(key=key).submit(PROMPT)
        assert refused.value.code == code
        assert refused.value.request_id


def test_a_server_that_is_gone(
    model_dir: Path, tmp_path: Path, connect: Callable[..., Any], service: LiveService
) -> None:
    """A stream whose service does not come back ends with an error once its patience is over."""
    clock = Clock()
    with LiveService(model_dir, tmp_path, redis_url=service.redis_url) as other:
        client = connect(key="", clock=clock, url=other.api_url, patience=9)
        submitted = client.submit(PROMPT, **LONG)
        stream = submitted.stream()
        first = next(stream)
        with halted_worker(other), halted_worker(service):
            assert other.api is not None
            other.api.kill()
            with pytest.raises(Unreachable, match="does not answer"):
                list(stream)
    assert first.seq == 0
    assert 4 < clock() <= 9


def documented_programs() -> list[str]:
    page = (ROOT / "docs" / "python-client.md").read_text("utf-8")
    return [part.split("```")[0] for part in page.split("```python\n")[1:]]


@pytest.mark.parametrize("program", documented_programs())
def test_the_documented_programs_run(
    service: LiveService, program: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKENMILL_URL", service.api_url)
    monkeypatch.setenv("TOKENMILL_API_KEY", KEY)

    exec(compile(program, "docs/python-client.md", "exec"), {"__name__": "documented"})

    assert capsys.readouterr().out.strip()


def test_tasks_are_found_and_deleted(connect: Callable[..., Any]) -> None:
    client = connect()
    mark = uuid.uuid4().hex
    ids = [client.submit(PROMPT, max_tokens=1, metadata={"mark": mark}).result().id for _ in range(3)]
    assert [task.id for task in client.list(metadata={"mark": mark}, status="completed")] == ids[::-1]
    assert [task.id for task in client.list(metadata={"mark": mark}, limit=2)] == ids[:0:-1]
    assert client.get(ids[0], include_prompt=True).request["prompt"] == PROMPT
    client.delete(ids[0])
    with pytest.raises(NotFound):
        client.get(ids[0])
    assert client.queue().model
    assert client.workers()[0].state == "ready"
