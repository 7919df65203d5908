"""A full queue on a real server: every submission is answered, and every accepted task runs."""

import json
import threading
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import HTTPError

from tests.api.conftest import HandWorker, StartServer
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.declarations import ApiSettings

CALLERS, LIMIT = 50, 5


def post(url: str, number: int) -> Any:
    """Status, Retry-After and body."""
    body = json.dumps({"prompt": f"number {number}", "max_tokens": 2}).encode()
    request = urllib.request.Request(f"{url}/v1/tasks", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.headers["Retry-After"], json.load(reply)
    except HTTPError as refused:
        with refused:
            return refused.code, refused.headers["Retry-After"], json.load(refused)


def test_many_concurrent_submissions_are_all_answered_and_the_accepted_finish(
    start: StartServer, worker: HandWorker, store: TaskStore
) -> None:
    """sglang#33858, nix-ai#1176: refusals never reached their clients, and sockets stayed open."""
    server = start(TOKENMILL_MAX_WAITING_TASKS=str(LIMIT))
    together, most_waiting, done = threading.Barrier(CALLERS), [], threading.Event()

    def call(number: int) -> Any:
        together.wait(60)
        return post(server.url, number)

    def watch() -> None:
        while not done.is_set():
            most_waiting.append(sum(store.queue_stats(ApiSettings().slug).waiting.values()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ThreadPoolExecutor(CALLERS) as callers:
            replies = list(callers.map(call, range(CALLERS)))
    finally:
        done.set()
        watcher.join()
    accepted = [body["id"] for status, _, body in replies if status == 202]
    refused = [(after, body) for status, after, body in replies if status == 429]
    assert (len(accepted), len(refused)) == (LIMIT, CALLERS - LIMIT)
    assert all(1 <= int(after) <= 60 for after, _ in refused)
    assert all((body["limit_met"], body["depth"], body["limit"]) == ("tasks", 5, 5) for _, body in refused)
    assert max(most_waiting) <= LIMIT
    assert sorted(worker.run("a", "b") for _ in accepted) == sorted(accepted)
    tasks = [json.loads(server.call("GET", f"/v1/tasks/{task_id}")[1]) for task_id in accepted]
    assert {(task["status"], task["outputs"][0]["text"]) for task in tasks} == {("completed", "ab")}
    assert post(server.url, CALLERS)[0] == 202
