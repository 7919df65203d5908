"""rq-dashboard shows the queues and jobs correctly."""

import json
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import free_port
from tests.live_service import LiveService, http, wait_for
from tests.services.traffic import run_traffic, start_long
from tokenmill.protocol import naming

pytestmark = pytest.mark.services

QUEUE = naming.queue_name(naming.model_slug("tiny-llama"), naming.DEFAULT_PRIORITY, naming.DEFAULT_TENANT)

ROOT = Path(__file__).parents[2]

Dashboard = Callable[[str], Any]


def documented_options(redis_url: str) -> list[str]:
    """The options of the documented command, with `redis_url` in place of the file that holds it."""
    (command,) = re.findall(r"`(rq-dashboard [^`]+)`", (ROOT / "docs" / "token-stream.md").read_text("utf-8"))
    _, *options = shlex.split(command.replace("$(cat .tokenmill/redis-url)", redis_url))
    return options


@pytest.fixture(scope="module")
def dashboard(
    live: LiveService, rq_dashboard: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Dashboard]:
    """Returns the JSON or the page at a path."""
    port = free_port()
    log_path = tmp_path_factory.mktemp("rq-dashboard") / "log"
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [rq_dashboard, *documented_options(live.redis_url), "--port", str(port), "--bind", "127.0.0.1"],
            stdout=log,
            stderr=log,
        )
    url = f"http://127.0.0.1:{port}"

    def is_up() -> bool:
        assert process.poll() is None, log_path.read_text()
        try:
            return http("GET", f"{url}/0/data/queues.json").status == 200
        except OSError:
            return False

    def get(path: str) -> Any:
        reply = http("GET", f"{url}/0/{path}")
        assert reply.status == 200, f"{reply.body!r}\n{log_path.read_text()[-2000:]}"
        return reply.json if path.endswith(".json") else reply.body.decode()

    try:
        wait_for(is_up, "rq-dashboard answers")
        yield get
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def tasks(live: LiveService) -> dict[str, list[str]]:
    return run_traffic(live)


def listed(dashboard: Dashboard, registry: str) -> set[str]:
    page = dashboard(f"data/jobs/{QUEUE}/{registry}/500/asc/1.json")
    return {job["id"] for job in page["jobs"]}


def test_ended_jobs_are_in_their_registries(dashboard: Dashboard, tasks: dict[str, list[str]]) -> None:
    assert listed(dashboard, "finished") >= set(tasks["completed"])
    assert listed(dashboard, "failed") == set(tasks["failed"])
    assert listed(dashboard, "canceled") >= set(tasks["cancelled"])


def test_a_finished_job_shows_its_result(
    dashboard: Dashboard, live: LiveService, tasks: dict[str, list[str]]
) -> None:
    (task_id, *_) = tasks["completed"]
    job = dashboard(f"data/job/{task_id}.json")
    assert job["status"] == "finished"
    assert job["origin"] == QUEUE
    assert job["created_at"] <= job["started_at"] <= job["ended_at"]
    text = live.task(task_id)["outputs"][0]["text"]
    assert json.dumps(text) in json.dumps(job["result"])


def test_a_failed_job_shows_its_error(
    dashboard: Dashboard, live: LiveService, tasks: dict[str, list[str]]
) -> None:
    (task_id,) = tasks["failed"]
    job = dashboard(f"data/job/{task_id}.json")
    assert job["status"] == "failed"
    assert live.task(task_id)["error"]["message"] in job["exc_info"]


def test_a_cancelled_job_is_shown_as_canceled(dashboard: Dashboard, tasks: dict[str, list[str]]) -> None:
    (task_id, *_) = tasks["cancelled"]
    assert dashboard(f"data/job/{task_id}.json")["status"] == "canceled"


def test_the_worker_is_listed_with_its_queues(dashboard: Dashboard) -> None:
    (worker,) = dashboard("data/workers.json")["workers"]
    assert QUEUE in worker["queues"]
    assert worker["state"] in {"idle", "busy"}


def test_running_and_waiting_jobs_are_counted(dashboard: Dashboard, live: LiveService) -> None:
    """More tasks than the worker has slots: the rest waits in the queue, and both numbers are shown."""
    ids = {start_long(live) for _ in range(60)}

    def seen() -> Any:
        queues = {queue["name"]: queue for queue in dashboard("data/queues.json")["queues"]}
        counts = QUEUE in queues and (queues[QUEUE]["count"], queues[QUEUE]["started_job_registry_count"])
        lists = listed(dashboard, "queued"), listed(dashboard, "started")
        # The reads are not atomic and jobs change state: repeat until all four have values.
        return counts and all(counts) and all(lists) and lists

    waiting, started = wait_for(seen, "some run and some wait")
    assert started <= ids
    assert waiting <= ids
    for task_id in ids:
        live.call("POST", f"/v1/tasks/{task_id}/cancel")
    wait_for(lambda: not listed(dashboard, "started") | listed(dashboard, "queued"), "all are cancelled")


@pytest.mark.parametrize("page", ["view/queues", "view/workers", f"view/jobs/{QUEUE}/finished/8/asc/1"])
def test_its_pages_open(dashboard: Dashboard, page: str) -> None:
    assert "<html" in dashboard(page)
