"""Calls the OpenAI-compatible routes while a stand-in for the worker answers. For tests only."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.api.api_client import ApiClient, ApiReply
from tests.api.conftest import HandWorker

PATIENCE_SECONDS = 30.0
Answer = Callable[[HandWorker, str], object]


def answering(*words: str, reason: str = "stop") -> Answer:
    """Say `words` and finish the task."""

    def answer(worker: HandWorker, task_id: str) -> None:
        worker.start(task_id)
        worker.say(task_id, *words)
        worker.finish(task_id, reason)

    return answer


def call(
    client: ApiClient,
    worker: HandWorker,
    path: str,
    body: dict[str, Any],
    answer: Answer,
    headers: Any = None,
) -> ApiReply:
    """POST `body`, and have the worker answer each task that is queued meanwhile."""
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(0.01):
            for task_id in worker.claim():
                answer(worker, task_id)

    with ThreadPoolExecutor(1) as threads:
        working = threads.submit(work)
        try:
            reply = client.post(path, json=body, headers=headers)
            reply.get_data()
        finally:
            ended.set()
        working.result(PATIENCE_SECONDS)
    return reply


def chunks(reply: ApiReply) -> list[Any]:
    """The objects of a stream that ends with `[DONE]`."""
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]
