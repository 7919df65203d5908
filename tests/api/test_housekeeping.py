"""The API's reaper: waiting tasks end in time while no worker is up, whatever happens to a run of it."""

import time

import pytest
from prometheus_client import CollectorRegistry

from api import housekeeping
from api.app import create_app
from api.housekeeping import PAUSE_SECONDS, PERIOD_SECONDS, START_SECONDS, Reaper
from api.redis_clients import connect
from api.settings import ApiSettings
from monitoring.reaper import ReapFailures
from tests.conftest import free_port, start_redis
from tokenmill.protocol import keys
from tokenmill.protocol.store.task_store import TaskStore


@pytest.fixture
def settings(redis_url):
    return ApiSettings(redis_url=redis_url, max_task_seconds=0.1)


class Time:
    """Seconds that the test lets pass."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def passing():
    return Time()


@pytest.fixture
def reaper(settings, store, registry, passing):
    return Reaper(settings, store, ReapFailures(registry, by_api=True), passing)


def num_failures(registry, duty="reaper"):
    return registry.get_sample_value("tokenmill_housekeeping_failures_total", {"duty": duty})


def test_a_task_that_waits_too_long_ends(client, submit, store, reaper):
    task_id = submit()
    while time.time() - store.inspect(task_id).accepted_at < 0.2:
        pass
    assert reaper.run() == PERIOD_SECONDS
    task = client.get(f"/v1/tasks/{task_id}").json
    assert (task["status"], task["outputs"][0]["finish_reason"]) == ("failed", "timeout")
    assert task["error"]["code"]


def test_limits_count_again_in_the_first_run_after_an_outage(tmp_path, passing):
    """A limit of three seconds was kept 56 s late after Redis had been away for 1.5 s."""
    port = free_port()
    settings = ApiSettings(redis_url=f"redis://127.0.0.1:{port}/0", max_task_seconds=0.0)
    server = start_redis(tmp_path, port)
    try:
        store = TaskStore(connect(settings.redis_url))
        reaper = Reaper(settings, store, ReapFailures(CollectorRegistry()), passing)
        submitted = submit_to(settings)
        server.process.terminate()
        server.process.wait()
        assert reaper.run() == PERIOD_SECONDS, "it looks again at once"
        server = start_redis(tmp_path, port)
        reaper.run()
        assert store.inspect(submitted).status == "failed"
    finally:
        server.process.kill()
        server.process.wait()


def submit_to(settings):
    reply = create_app(settings).test_client().post("/v1/tasks", json={"prompt": "x"})
    assert reply.status_code == 202
    return reply.json["id"]


@pytest.mark.parametrize(("since", "wait"), [("the start", START_SECONDS), ("an outage", PAUSE_SECONDS)])
def test_leases_count_as_lapsed_later(submit, worker, reaper, passing, redis_client, since, wait):
    """Living workers could not renew them meanwhile; to take them back at once would start tasks twice."""
    task_id = submit()
    worker.claim()
    redis_client.zadd(keys.LEASES, {task_id: 1})
    reaper._settings = ApiSettings(redis_url=reaper._settings.redis_url)
    if since == "an outage":
        passing.now = 2 * START_SECONDS
        working, reaper._store = reaper._store, TaskStore(connect("redis://127.0.0.1:1/0"))
        reaper.run()
        reaper._store = working
    began = passing.now

    def is_taken_back(seconds):
        passing.now = began + seconds
        reaper.run()
        return not redis_client.exists(keys.LEASES)

    assert [is_taken_back(seconds) for seconds in (0.0, wait - 1, wait)] == [False, False, True]


@pytest.mark.parametrize("error", [ValueError("a bug"), KeyError("x"), RecursionError()])
def test_no_exception_ends_it(reaper, registry, monkeypatch, error, caplog):
    def broken(*_, **__):
        raise error

    monkeypatch.setattr(reaper._store, "reap", broken)
    assert [reaper.run(), reaper.run()] == [PERIOD_SECONDS] * 2
    assert num_failures(registry) == 2
    assert "goes on" in caplog.text


def test_a_record_that_cannot_be_treated_is_counted_and_logged(
    submit, reaper, registry, redis_client, caplog
):
    bad, good = submit(), submit()
    redis_client.set(keys.log(bad), "x")
    while time.time() - reaper._store.inspect(good).accepted_at < 0.2:
        pass
    reaper.run()
    assert reaper._store.inspect(good).status == "failed"
    assert num_failures(registry, "overdue") == 1
    assert bad in caplog.text


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_survives_what_its_turn_raises(monkeypatch):
    monkeypatch.setattr(housekeeping, "PERIOD_SECONDS", 0.0)
    turns = []

    def turn():
        turns.append(1)
        # The second ends the thread, as nothing else does.
        raise RuntimeError("a bug") if len(turns) == 1 else SystemExit

    thread = housekeeping._start("t", turn)
    thread.join(60)
    assert (len(turns), thread.is_alive()) == (2, False)
