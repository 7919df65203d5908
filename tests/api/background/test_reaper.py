"""The API's reaper: overdue tasks end while no worker runs, and no error stops it."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis
from prometheus_client import CollectorRegistry

from api.app import create_app
from api.background.reaper import OUTAGE_SECONDS, PERIOD_SECONDS, START_SECONDS, Reaper
from api.redis_clients import connect
from monitoring.reaper import ReapFailures
from tests.api.api_client import ApiClient, client_of
from tests.api.conftest import HandWorker, Submit
from tests.conftest import free_port, start_redis
from tokenmill.protocol import keys
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.declarations import ApiSettings

UNREACHABLE = "redis://127.0.0.1:1/0"


@pytest.fixture
def settings(redis_url: str) -> ApiSettings:
    return ApiSettings(redis_url=redis_url).model_copy(update={"max_task_seconds": 0.1})


class Time:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Time:
    return Time()


@pytest.fixture
def make_reaper(
    store: TaskStore, registry: CollectorRegistry, clock: Time
) -> Callable[[ApiSettings], Reaper]:
    return lambda settings: Reaper(settings, store, ReapFailures(registry, by_api=True), clock)


@pytest.fixture
def reaper(make_reaper: Callable[[ApiSettings], Reaper], settings: ApiSettings) -> Reaper:
    return make_reaper(settings)


def num_failures(registry: CollectorRegistry, duty: str = "reaper") -> float | None:
    return registry.get_sample_value("tokenmill_housekeeping_failures_total", {"duty": duty})


def wait_until_overdue(store: TaskStore, task_id: str) -> None:
    task = store.inspect(task_id)
    assert task is not None
    time.sleep(max(0.0, task.accepted_at + 0.2 - time.time()))


def test_a_task_that_waits_too_long_ends(
    client: ApiClient, submit: Submit, store: TaskStore, reaper: Reaper
) -> None:
    task_id = submit()
    wait_until_overdue(store, task_id)
    assert reaper.run() == PERIOD_SECONDS
    task = client.get(f"/v1/tasks/{task_id}").json
    assert (task["status"], task["outputs"][0]["finish_reason"]) == ("failed", "timeout")
    assert task["error"]["code"]


def test_time_limits_apply_in_the_first_run_after_an_outage(tmp_path: Path, clock: Time) -> None:
    """A limit of three seconds was once enforced 56 s late after Redis had been away for 1.5 s."""
    port = free_port()
    settings = ApiSettings(redis_url=f"redis://127.0.0.1:{port}/0").model_copy(
        update={"max_task_seconds": 0.0}
    )
    server = start_redis(tmp_path, port)
    try:
        store = TaskStore(connect(settings.redis_url))
        reaper = Reaper(settings, store, ReapFailures(CollectorRegistry()), clock)
        task_id = submit_to(settings)
        server.process.terminate()
        server.process.wait()
        assert reaper.run() == PERIOD_SECONDS, "an outage does not lengthen the period"
        server = start_redis(tmp_path, port)
        reaper.run()
        task = store.inspect(task_id)
        assert task is not None
        assert task.status == "failed"
    finally:
        server.process.kill()
        server.process.wait()


def submit_to(settings: ApiSettings) -> str:
    reply = client_of(create_app(settings)).post("/v1/tasks", json={"prompt": "x"})
    assert reply.status_code == 202
    return str(reply.json["id"])


@pytest.mark.parametrize(("since", "wait"), [("the start", START_SECONDS), ("an outage", OUTAGE_SECONDS)])
def test_no_lease_expires_at_first(
    submit: Submit,
    worker: HandWorker,
    make_reaper: Callable[[ApiSettings], Reaper],
    clock: Time,
    redis_client: redis.Redis,
    redis_url: str,
    since: str,
    wait: float,
) -> None:
    """Live workers could not renew their leases meanwhile; requeueing at once would start tasks twice."""
    reaper = make_reaper(ApiSettings(redis_url=redis_url))
    task_id = submit()
    worker.claim()
    redis_client.zadd(keys.LEASES, {task_id: 1})
    if since == "an outage":
        clock.now = 2 * START_SECONDS
        store, reaper.store = reaper.store, TaskStore(connect(UNREACHABLE))
        reaper.run()
        reaper.store = store
    began = clock.now

    def is_requeued(seconds: float) -> bool:
        clock.now = began + seconds
        reaper.run()
        return not redis_client.exists(keys.LEASES)

    assert [is_requeued(seconds) for seconds in (0.0, wait - 1, wait)] == [False, False, True]


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyError("x"), redis.ResponseError("ERR a bug")])
def test_no_exception_stops_it(
    reaper: Reaper,
    registry: CollectorRegistry,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(reaper.store, "reap", broken)
    assert [reaper.run(), reaper.run()] == [PERIOD_SECONDS] * 2
    assert num_failures(registry) == 2
    assert "will run again" in caplog.text


def test_a_damaged_record_is_counted_and_logged(
    submit: Submit,
    store: TaskStore,
    reaper: Reaper,
    registry: CollectorRegistry,
    redis_client: redis.Redis,
    caplog: pytest.LogCaptureFixture,
) -> None:
    bad, good = submit(), submit()
    redis_client.set(keys.log(bad), "x")
    wait_until_overdue(store, good)
    reaper.run()
    task = store.inspect(good)
    assert task is not None
    assert task.status == "failed"
    assert num_failures(registry, "overdue") == 1
    assert bad in caplog.text
