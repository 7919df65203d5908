"""The API's reaper: waiting tasks end in time while no worker is up."""

import time

import pytest

from api.housekeeping import PAUSE_SECONDS, PERIOD_SECONDS, reap
from api.redis_clients import connect
from api.settings import ApiSettings
from worker.protocol.store import TaskStore


@pytest.fixture
def settings(redis_url):
    return ApiSettings(redis_url=redis_url, max_task_seconds=0.1)


def test_a_task_that_waits_too_long_ends(client, submit, store, settings, caplog):
    task_id = submit()
    while time.time() - store.inspect(task_id).accepted_at < 0.2:
        pass
    assert reap(settings, store) == PERIOD_SECONDS
    task = client.get(f"/v1/tasks/{task_id}").json
    assert (task["status"], task["outputs"][0]["finish_reason"]) == ("failed", "timeout")
    assert task["error"]["code"]


def test_after_an_outage_it_waits_for_the_workers():
    """Their leases could not be renewed meanwhile; whoever took them back at once would start tasks twice."""
    settings = ApiSettings(redis_url="redis://127.0.0.1:1/0")
    assert reap(settings, TaskStore(connect(settings.redis_url))) == PAUSE_SECONDS
