"""`python -m worker` with a tiny model of a real architecture."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import redis

from tests.conftest import free_port
from tests.live_service import wait_for
from tests.tiny_models import save_model
from tests.worker.fakes import job_data, log_length, tokens_of
from tokenmill.protocol import naming
from tokenmill.protocol.messages import Event, FinishedEvent, GenerateRequest
from tokenmill.protocol.records import Submission, WorkerRecord
from tokenmill.protocol.store.task_store import TaskStore

ROOT = Path(__file__).parents[2]
LONG = {"max_tokens": 400, "temperature": 0, "ignore_eos": True}

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def start(redis_url: str, model: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def start_worker(**env: str) -> "subprocess.Popen[bytes]":
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "REDIS_URL": redis_url,
            "TOKENMILL_MODEL": str(model),
            "TOKENMILL_METRICS_PORT": "0",
            "TOKENMILL_LEASE_SECONDS": "2",
            "TOKENMILL_NUM_KV_BLOCKS": "500",
            **env,
        }
        started.append(subprocess.Popen([sys.executable, "-m", "worker"], cwd=ROOT, env=environment))
        return started[-1]

    yield start_worker
    for process in started:
        process.kill()
        process.wait()


def has_length(client: "redis.Redis", task: str, length: int) -> bool:
    return log_length(client, task) >= length


def submit(client: "redis.Redis", model: Path, **fields: object) -> str:
    slug = naming.model_slug(model.name)
    queue = naming.queue_name(slug, 2, "default")
    request = GenerateRequest(id=naming.new_task_id(), model=model.name, **fields)  # type: ignore[arg-type]  # tests
    submission = Submission(
        task_id=request.id,
        queue=queue,
        slug=slug,
        model=model.name,
        priority=2,
        tenant="default",
        job_fields={"status": "queued", "data": job_data(request.to_payload()), "origin": queue},
        cost=100,
    )
    return TaskStore(client).submit(submission).task_id


def ended(client: "redis.Redis", task: str) -> list[Event]:
    def events() -> list[Event]:
        found = TaskStore(client).read_log(task)
        return found if found and isinstance(found[-1], FinishedEvent) else []

    found: list[Event] = wait_for(events, f"{task} ends")
    assert [event.seq for event in found] == list(range(len(found)))
    return found


def record(client: "redis.Redis", state: str) -> WorkerRecord:
    found: WorkerRecord = wait_for(
        lambda: next((one for one in TaskStore(client).workers() if one.state == state), None),
        f"a worker is {state}",
    )
    return found


def test_from_loading_to_the_last_token(redis_client: "redis.Redis", start: Start, model: Path) -> None:
    port = free_port()
    text = submit(redis_client, model, prompt="the quick brown fox", sampling={"max_tokens": 20})
    chat = submit(
        redis_client,
        model,
        messages=({"role": "user", "content": "hello world"},),
        sampling={"max_tokens": 9},
    )
    worker = start(TOKENMILL_METRICS_PORT=str(port))
    assert record(redis_client, "loading").model == "tiny-llama"
    for task in (text, chat):
        end = ended(redis_client, task)[-1]
        assert isinstance(end, FinishedEvent)
        assert end.finish_reason in ("stop", "length")

    card = TaskStore(redis_client).model_card(naming.model_slug(model.name))
    assert card is not None
    assert (card.vocab_size, card.max_prompt_tokens, card.has_chat_template) == (320, 2047, True)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        metrics = answer.read().decode()
    assert 'tokenmill_tasks_claimed_total{model="tiny-llama"} 2.0' in metrics
    assert 'tokenmill_requests_finished_total{model="tiny-llama"' in metrics
    worker.terminate()
    assert worker.wait(60) == 0
    assert TaskStore(redis_client).workers() == []


def test_killed_and_resumed_with_the_same_text(
    redis_client: "redis.Redis", start: Start, model: Path
) -> None:
    """rq#1164: no job stays `started` for ever. The text is that of a request without faults."""
    prompts = ["one two three", "what is the capital of France?", "token by token"]
    tasks = [submit(redis_client, model, prompt=prompt, sampling=LONG) for prompt in prompts]
    first = start()
    for task in tasks:
        wait_for(partial(has_length, redis_client, task, 5), "each has begun")
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert all(log_length(redis_client, task) < 400 for task in tasks)

    start()
    resumed = [ended(redis_client, task) for task in tasks]
    fresh = [ended(redis_client, submit(redis_client, model, prompt=one, sampling=LONG)) for one in prompts]

    for one, other in zip(resumed, fresh, strict=True):
        assert tokens_of(one) == tokens_of(other)
        assert "".join(event.text for event in one) == "".join(event.text for event in other)
        assert len(tokens_of(one)) == 400


def test_an_unusable_setting_is_exit_status_78(redis_client: "redis.Redis", start: Start) -> None:
    assert start(TOKENMILL_MAX_NUM_SEQS="many").wait(60) == 78
    assert start(TOKENMILL_MODEL="/nowhere/at/all").wait(60) == 78


def test_a_metrics_port_in_use_is_exit_status_78(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    """A restart does not help while the port is in use. The line names the setting to change."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert start(TOKENMILL_METRICS_PORT=str(port)).wait(60) == 78
    assert f"TOKENMILL_METRICS_PORT: cannot listen on 127.0.0.1:{port}" in capfd.readouterr().err
