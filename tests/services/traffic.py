"""Traffic for tests of a live service: tasks with every kind of end, over HTTP."""

import urllib.request

from tests.live_service import LiveService, wait_for
from tests.services.conftest import MAX_MODEL_LEN

NUM_COMPLETED = 6
NUM_CANCELLED = 5
NUM_FAILED = 1
NUM_TASKS = NUM_COMPLETED + NUM_CANCELLED + NUM_FAILED


def start_long(live: LiveService) -> str:
    """Submit a long task, which still runs when the caller checks it."""
    return live.submit(prompt="one two three", max_tokens=MAX_MODEL_LEN - 100, ignore_eos=True)


def run_traffic(live: LiveService) -> dict[str, list[str]]:
    """Run tasks until all have ended. Returns their ids by status."""
    cancelled = [run_and_cancel(live) for _ in range(NUM_CANCELLED)]
    completed = [
        live.submit(prompt=f"the quick brown fox {number}", max_tokens=8 * (number + 1), ignore_eos=True)
        for number in range(NUM_COMPLETED)
    ]
    # The size passes the API. Only the worker counts the tokens, and there are too many.
    failed = live.submit(prompt="the quick brown fox " * (MAX_MODEL_LEN // 2), max_tokens=4)
    read_stream(live, completed[-1])
    ids = {"completed": completed, "cancelled": cancelled, "failed": [failed]}
    for status, tasks in ids.items():
        for task in tasks:
            assert live.wait_task(task)["status"] == status, live.task(task)
    return ids


def run_and_cancel(live: LiveService) -> str:
    task_id = start_long(live)
    wait_for(lambda: live.task(task_id)["status"] != "queued", "the task runs")
    assert live.call("POST", f"/v1/tasks/{task_id}/cancel").status == 200
    return task_id


def read_stream(live: LiveService, task_id: str) -> None:
    """Follow the event stream of a task to its end."""
    with urllib.request.urlopen(f"{live.api_url}/v1/tasks/{task_id}/events", timeout=120) as stream:
        assert b"event: finished" in stream.read()
