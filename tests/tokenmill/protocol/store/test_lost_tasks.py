"""A task of which Redis lost keys ends as lost, not as cancelled."""

from collections.abc import Iterator

import pytest

from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.tasks import claim, claim_one, owned, publish, reap, settle, submit
from tokenmill.protocol import keys
from tokenmill.protocol.records import Lost
from tokenmill.protocol.store.task_store import TaskStore


@pytest.fixture
def evicting(redis_client: RedisClient) -> Iterator[RedisClient]:
    """A server that may evict keys."""
    redis_client.config_set("maxmemory", 2**30)
    redis_client.config_set("maxmemory-policy", "allkeys-lru")
    yield redis_client
    redis_client.config_set("maxmemory-policy", "noeviction")
    redis_client.config_set("maxmemory", 0)


def assert_lost(store: TaskStore, task_id: str) -> None:
    snapshot = store.inspect(task_id)
    assert snapshot is not None
    assert snapshot.status == "failed"
    end = store.read_log(task_id)[-1]
    assert (end.finish_reason, end.done, end.error["code"]) == ("error", True, "lost")  # type: ignore[union-attr,index]


def test_a_waiting_task_whose_job_was_evicted_is_lost(store: TaskStore, evicting: RedisClient) -> None:
    task_id, other = submit(store, evicting), submit(store, evicting)
    evicting.delete(f"rq:job:{task_id}")
    assert [one.task_id for one in claim(store)] == [other]
    assert_lost(store, task_id)


def test_a_waiting_task_whose_job_and_list_were_evicted_is_lost(
    store: TaskStore, evicting: RedisClient
) -> None:
    task_id = submit(store, evicting)
    evicting.delete(f"rq:job:{task_id}", *evicting.keys("rq:queue:*"))
    assert reap(store).lost == (task_id,)
    assert_lost(store, task_id)


@pytest.mark.parametrize("how", ["renew", "publish", "hand_back", "reap"])
def test_a_running_task_whose_job_was_evicted_is_lost(
    store: TaskStore, evicting: RedisClient, how: str
) -> None:
    task_id = submit(store, evicting)
    held = claim_one(store, lease_seconds=-1)
    publish(store, held, 0, 2)
    evicting.delete(f"rq:job:{task_id}")
    if how == "renew":
        assert store.renew(owned([held]), 60).lost == {task_id}
    elif how == "publish":
        assert settle(store, held, 2) == Lost()
    elif how == "hand_back":
        assert store.hand_back(owned([held])) == 0
    else:
        assert reap(store).lost == (task_id,)
    assert_lost(store, task_id)
    assert publish(store, held, 2, 1) == Lost()
    assert evicting.pttl(keys.run(task_id)) > 0


def test_a_job_cancelled_with_rqs_tools_is_cancelled_on_such_a_server_too(
    store: TaskStore, evicting: RedisClient
) -> None:
    task_id = submit(store, evicting)
    evicting.hset(f"rq:job:{task_id}", "status", "canceled")
    assert claim(store) == []
    assert store.inspect(task_id).status == "cancelled"  # type: ignore[union-attr]
