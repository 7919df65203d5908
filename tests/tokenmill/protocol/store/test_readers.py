"""Tasks that are cancelled with their last reader, and when they are not."""

import json

import pytest

from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.tasks import claim_one, publish, reap, settle, submit, unchanged
from tokenmill.protocol import keys
from tokenmill.protocol.records import Cancelled
from tokenmill.protocol.store.readers import Readers
from tokenmill.protocol.store.task_store import TaskStore


@pytest.fixture
def readers(redis_client: RedisClient) -> Readers:
    return Readers(redis_client)


@pytest.fixture
def task_id(store: TaskStore, redis_client: RedisClient) -> str:
    return submit(store, redis_client, cancel_on_disconnect=True)


def status(store: TaskStore, task_id: str) -> str:
    snapshot = store.inspect(task_id)
    assert snapshot is not None
    return snapshot.status


def remembered(client: RedisClient, task_id: str) -> bool:
    return bool(client.exists(keys.readers(task_id)) or client.exists(keys.WATCHED))


def lapse(client: RedisClient, task_id: str) -> None:
    """Let its readers lapse."""
    client.delete(keys.readers(task_id))
    client.zadd(keys.WATCHED, {task_id: 1})


def test_a_task_is_cancelled_when_its_last_reader_disconnects(
    store: TaskStore, readers: Readers, redis_client: RedisClient, task_id: str
) -> None:
    for reader in ("a", "b", "c"):
        readers.read(task_id, reader, 60)
    assert not readers.leave(task_id, "a", gone=True)
    assert not readers.leave(task_id, "b", gone=False)
    assert status(store, task_id) == "queued"
    assert readers.leave(task_id, "c", gone=True)
    assert status(store, task_id) == "cancelled"
    assert not remembered(redis_client, task_id)
    assert not unchanged(redis_client, lambda: readers.leave(task_id, "c", gone=True))


def test_a_running_task_is_taken_from_its_owner(
    store: TaskStore, readers: Readers, redis_client: RedisClient, task_id: str
) -> None:
    claimed = claim_one(store)
    publish(store, claimed, 0, 2)
    readers.read(task_id, "a", 60)
    with redis_client.pubsub() as pubsub:
        pubsub.subscribe(keys.CONTROL)
        assert pubsub.get_message(timeout=60)["type"] == "subscribe"
        assert readers.leave(task_id, "a", gone=True)
        assert json.loads(pubsub.get_message(timeout=60)["data"]) == {"cancel": task_id}
    assert publish(store, claimed, 2, 1) == Cancelled()


def test_a_reader_that_finishes_cancels_nothing(
    store: TaskStore, readers: Readers, redis_client: RedisClient, task_id: str
) -> None:
    """A poll that was answered after its wait."""
    readers.read(task_id, "a", 60)
    assert not readers.leave(task_id, "a", gone=False)
    assert not remembered(redis_client, task_id)
    assert reap(store).cancelled == ()
    assert status(store, task_id) == "queued"


def test_the_readers_of_a_dead_server_lapse(
    store: TaskStore, readers: Readers, redis_client: RedisClient, task_id: str
) -> None:
    readers.read(task_id, "a", 60)
    assert reap(store).cancelled == ()
    lapse(redis_client, task_id)
    assert reap(store).cancelled == (task_id,)
    assert status(store, task_id) == "cancelled"
    assert not remembered(redis_client, task_id)


def test_one_of_several_readers_that_lapsed_cancels_nothing(
    store: TaskStore, readers: Readers, redis_client: RedisClient, task_id: str
) -> None:
    readers.read(task_id, "dead", 60)
    readers.read(task_id, "alive", 60)
    redis_client.zadd(keys.readers(task_id), {"dead": 1})
    redis_client.zadd(keys.WATCHED, {task_id: 1})
    assert reap(store).cancelled == ()
    # The task is checked again when the other may have lapsed.
    assert redis_client.zscore(keys.WATCHED, task_id) == redis_client.zscore(keys.readers(task_id), "alive")
    redis_client.zadd(keys.readers(task_id), {"dead": 1})
    assert readers.leave(task_id, "alive", gone=True)


def test_a_reader_that_renews_stays(
    store: TaskStore, readers: Readers, redis_client: RedisClient, task_id: str
) -> None:
    readers.read(task_id, "a", 60)
    readers.read(task_id, "a", 600)
    assert redis_client.zscore(keys.readers(task_id), "a") == pytest.approx(
        redis_client.time()[0] + 600, abs=30
    )
    assert redis_client.zscore(keys.WATCHED, task_id) == redis_client.zscore(keys.readers(task_id), "a")
    assert 500 < redis_client.ttl(keys.readers(task_id)) <= 600
    # A reader with less time does not shorten another's.
    readers.read(task_id, "b", 60)
    assert redis_client.zscore(keys.WATCHED, task_id) == redis_client.zscore(keys.readers(task_id), "a")
    assert redis_client.pttl(keys.readers(task_id)) > 500_000


def test_readers_of_other_tasks_are_not_stored(
    store: TaskStore, readers: Readers, redis_client: RedisClient
) -> None:
    task_id = submit(store, redis_client)
    unchanged(redis_client, lambda: readers.read(task_id, "a", 60))
    unchanged(redis_client, lambda: readers.read("0" * 32, "a", 60))
    assert not unchanged(redis_client, lambda: readers.leave("0" * 32, "a", gone=True))


def test_an_end_deletes_the_readers(
    store: TaskStore, readers: Readers, redis_client: RedisClient, task_id: str
) -> None:
    readers.read(task_id, "a", 60)
    settle(store, claim_one(store))
    assert not remembered(redis_client, task_id)
    unchanged(redis_client, lambda: readers.read(task_id, "a", 60))
    assert not unchanged(redis_client, lambda: readers.leave(task_id, "a", gone=True))
    assert status(store, task_id) == "completed"


def test_full_memory_does_not_prevent_a_cancellation(
    store: TaskStore, readers: Readers, redis_client: RedisClient
) -> None:
    task_id = submit(store, redis_client, cancel_on_disconnect=True)
    readers.read(task_id, "a", 60)
    redis_client.config_set("maxmemory", 1)
    try:
        assert readers.leave(task_id, "a", gone=True)
    finally:
        redis_client.config_set("maxmemory", 0)
