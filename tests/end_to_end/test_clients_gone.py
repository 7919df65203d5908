"""Disconnects and webhooks with a real worker."""

import base64
import json
import re
import signal
import socket
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from api.streams.reader_lease import READER_SECONDS, RENEW_SECONDS
from tests.api.webhooks.receiver import receiving
from tests.live_service import LiveService, http, wait_for
from tests.tiny_models import save_model
from tokenmill.protocol import keys

LIMITS = {
    "TOKENMILL_DTYPE": "float32",
    "TOKENMILL_MAX_NUM_BATCHED_TOKENS": "4",
    "TOKENMILL_MAX_NUM_SEQS": "2",
    "TOKENMILL_PREFIX_CACHING": "false",
    # Nothing is written while nothing is generated: only a check of the connection detects the close.
    "TOKENMILL_HEARTBEAT_SECONDS": "600",
    "TOKENMILL_WEBHOOK_SECRET": f"whsec_{base64.b64encode(b'k' * 32).decode()}",
    "TOKENMILL_WEBHOOK_ALLOW_PRIVATE": "true",
}
LONG = {"max_tokens": 1900, "temperature": 0, "ignore_eos": True}
"""Such a request runs far longer than a test."""


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveService]:
    model_dir = save_model(tmp_path_factory.mktemp("model"))
    with LiveService(model_dir, tmp_path_factory.mktemp("service"), LIMITS) as running:
        yield running


Read = Callable[[str], socket.socket]
NOTICED_SECONDS = READER_SECONDS - RENEW_SECONDS
"""A reader whose disconnect is missed expires later than this."""


@pytest.fixture(params=["/events", "?wait=60"], ids=["stream", "long-poll"])
def read(request: pytest.FixtureRequest, service: LiveService) -> Iterator[Read]:
    """Opens a connection that reads a task to its end. Returns when the service has registered the reader."""
    address = urlsplit(service.api_url)
    with redis.Redis.from_url(service.redis_url) as client:

        def open_one(task_id: str) -> socket.socket:
            connection = socket.create_connection((address.hostname, address.port), timeout=60)
            line = f"GET /v1/tasks/{task_id}{request.param} HTTP/1.1"
            connection.sendall(f"{line}\r\nHost: x\r\n\r\n".encode())
            wait_for(lambda: client.zcard(keys.readers(task_id)), "the reader is registered")
            return connection

        yield open_one


def wait_for_cancel(service: LiveService, task_id: str) -> Any:
    """Returns the task after its cancellation. Call it right after the disconnect."""
    with redis.Redis.from_url(service.redis_url) as client:
        gone_at = client.time()[0]
        task = service.wait_task(task_id)
        finished_at = float(client.hget(keys.run(task_id), "finished_at") or 0)
    assert task["status"] == "cancelled"
    assert finished_at < gone_at + NOTICED_SECONDS, "its lease expired first"
    return task


def tokens_of(task: Any) -> int:
    return int(task["usage"]["completion_tokens"]) if task["usage"] else 0


def has_tokens(service: LiveService, task_id: str) -> bool:
    return tokens_of(service.task(task_id)) > 0


def wait_until_idle(service: LiveService) -> None:
    """No request holds a slot or a block."""

    def is_zero(name: str) -> bool:
        text = http("GET", f"{service.worker.url}/metrics").body.decode()
        found = re.search(rf"^tokenmill_{name} (\S+)$", text, re.MULTILINE)
        assert found, name
        return float(found[1]) == 0

    labels = r"\{[^}]*state=\"%s\"[^}]*\}"
    for series in (f"requests{labels % 'running'}", f"kv_blocks{labels % 'used'}"):
        wait_for(partial(is_zero, series), f"{series} is 0")


def test_a_disconnect_in_the_middle_of_the_output(service: LiveService, read: Read) -> None:
    """llama.cpp#24496, ollama#11889: generation continued for a disconnected client."""
    task_id = service.submit(prompt="one two three", on_disconnect="cancel", **LONG)
    with read(task_id):
        wait_for(lambda: tokens_of(service.task(task_id)) >= 2, "two tokens are published")
    task = wait_for_cancel(service, task_id)
    assert 2 <= tokens_of(task) < 1900
    wait_until_idle(service)


def test_a_disconnect_during_a_long_prefill(service: LiveService, read: Read) -> None:
    """llama.cpp#13262, werkzeug#1649: no byte is written during the prefill, so no write can fail.

    The worker is stopped meanwhile: a fast machine would finish the prompt before the disconnect is noticed.
    """
    task_id = service.submit(prompt_token_ids=[7] * 1900, on_disconnect="cancel", ignore_eos=True)
    worker = service.worker.popen
    try:
        with read(task_id):
            wait_for(lambda: service.task(task_id)["status"] == "in_progress", "the prompt is being computed")
            worker.send_signal(signal.SIGSTOP)
            before = tokens_of(service.task(task_id))
        assert tokens_of(wait_for_cancel(service, task_id)) == before
    finally:
        worker.send_signal(signal.SIGCONT)
    wait_until_idle(service)


def test_a_disconnect_while_queued(service: LiveService, read: Read) -> None:
    """mlx-openai-server#269: no token is computed for it. Tasks that are only polled are not affected."""
    running = [service.submit(prompt="one two", **LONG) for _ in range(2)]
    for task_id in running:
        wait_for(partial(has_tokens, service, task_id), "the slots are taken")
    gone, polled = (service.submit(prompt="three", on_disconnect="cancel", **LONG) for _ in range(2))
    read(gone).close()
    assert tokens_of(wait_for_cancel(service, gone)) == 0
    assert service.task(polled)["status"] == "queued"
    assert {service.task(task_id)["status"] for task_id in running} == {"in_progress"}
    for task_id in (*running, polled):
        service.call("DELETE", f"/v1/tasks/{task_id}")
    wait_until_idle(service)


def test_a_webhook_has_what_polling_shows(service: LiveService) -> None:
    with receiving() as receiver:
        task_id = service.submit(
            prompt="one two three", max_tokens=5, n=2, ignore_eos=True, webhook={"url": receiver.url()}
        )
        event = json.loads(receiver.next().body)
    assert event["type"] == "task.completed"
    assert event["data"] == {**service.task(task_id), "webhook": None}
    assert [len(output["token_ids"]) for output in event["data"]["outputs"]] == [5, 5]
