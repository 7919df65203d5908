"""Replies for a task whose keys Redis has lost, and while Redis cannot write."""

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from api.app import create_app
from tests.api.api_client import ApiClient, client_of
from tests.api.conftest import Submit
from tests.conftest import free_port
from tokenmill.protocol import keys
from tokenmill.protocol.naming import new_task_id
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.serve.embedded_redis import find_redis_server
from tokenmill.settings.declarations import ApiSettings


def test_a_task_with_missing_keys_is_lost(
    client: ApiClient, submit: Submit, redis_client: redis.Redis
) -> None:
    task_id = submit()
    redis_client.delete(keys.run(task_id))
    reply = client.get(f"/v1/tasks/{task_id}")
    assert (reply.status_code, reply.json["error"]["code"]) == (404, "lost")
    assert client.get(f"/v1/tasks/{new_task_id()}").json["error"]["code"] == "task_not_found"


def test_a_fully_evicted_task_names_the_possible_cause(client: ApiClient) -> None:
    """Redis has no key of it. Only the time in its id distinguishes it from an id that never existed."""
    evicted, never = (client.get(f"/v1/tasks/{task_id}").json for task_id in (new_task_id(), "f" * 32))
    assert evicted["error"]["code"] == never["error"]["code"] == "task_not_found"
    assert "/readyz" in evicted["detail"]
    assert "/readyz" not in never["detail"]


def test_the_lost_task_of_another_tenant_is_not_found(
    store: TaskStore, submit: Submit, redis_client: redis.Redis
) -> None:
    task_id = submit()
    redis_client.delete(keys.run(task_id))
    assert store.is_lost(task_id, "default")
    assert not store.is_lost(task_id, "another")


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Any]:
    """A server and the path of its dump file: a directory of the same name makes writes fail."""
    port, directory = free_port(), tmp_path / "data"
    directory.mkdir()
    command = [find_redis_server(), "--port", str(port), "--dir", str(directory), "--save", "3600 1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    admin = redis.Redis(port=port)
    while True:
        try:
            admin.ping()
            break
        except redis.ConnectionError:
            assert process.poll() is None
    yield admin, directory / "dump.rdb", f"redis://127.0.0.1:{port}/0"
    process.kill()
    process.wait()


def save(admin: Any, expected: Any) -> None:
    while admin.info("persistence")["rdb_bgsave_in_progress"]:
        pass
    admin.bgsave()
    while True:
        state = admin.info("persistence")
        if not state["rdb_bgsave_in_progress"]:
            assert state["rdb_last_bgsave_status"] == expected
            return


def test_a_full_disk_is_503_with_the_reason_until_there_is_room(full_disk: Any) -> None:
    admin, obstacle, url = full_disk
    client = client_of(create_app(ApiSettings(redis_url=url)))
    task_id = client.post("/v1/tasks", json={"prompt": "x"}).json["id"]
    obstacle.mkdir()
    save(admin, "err")
    for method, path, body in (
        ("POST", "/v1/tasks", {"prompt": "x"}),
        ("DELETE", f"/v1/tasks/{task_id}", None),
        ("GET", "/readyz", None),
    ):
        reply = client.open(path, method=method, json=body)
        assert reply.status_code == 503
        assert "disk" in reply.json["detail"]
        assert int(reply.headers["Retry-After"]) >= 1
    assert client.get(f"/v1/tasks/{task_id}").status_code == 200, "tasks can still be read"
    obstacle.rmdir()
    save(admin, "ok")
    assert client.post("/v1/tasks", json={"prompt": "x"}).status_code == 202


def test_leases_that_expire_meanwhile_do_not_count_as_crashes(full_disk: Any) -> None:
    """Two dozen tasks once were isolated after a full disk."""
    admin, obstacle, url = full_disk
    settings = ApiSettings(redis_url=url)
    client, store = client_of(create_app(settings)), TaskStore(redis.Redis.from_url(url))
    client.post("/v1/tasks", json={"prompt": "x"})
    (held,) = store.claim(settings.slug, worker="w", max_tasks=1, lease_seconds=0.001)
    store.renew({held.task_id: held.owner}, 0.001)
    obstacle.mkdir()
    save(admin, "err")
    with pytest.raises(redis.ResponseError, match="MISCONF"):
        store.hand_back({held.task_id: held.owner})
    obstacle.rmdir()
    save(admin, "ok")
    # This reaper was refused too.
    reaped = store.reap(settings.slug, max_task_seconds=3600, failed_seconds_ago=0.0)
    assert reaped.returned == (held.task_id,)
    (again,) = store.claim(settings.slug, worker="w", max_tasks=1, lease_seconds=60)
    assert not again.suspect
