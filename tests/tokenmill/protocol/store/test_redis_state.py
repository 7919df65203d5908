"""A server in a bad state refuses a change as a whole; the documented list of keys is complete."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.tasks import (
    SLUG,
    claim,
    claim_one,
    dump,
    final_write,
    owned,
    publish,
    reap,
    settle,
    submission,
    submit,
)
from tokenmill.protocol import keys
from tokenmill.protocol.limits import TimeLimits
from tokenmill.protocol.records import Renewed, WorkerRecord
from tokenmill.protocol.store.outbox import Attempt, Outbox
from tokenmill.protocol.store.readers import Readers
from tokenmill.protocol.store.task_store import TaskStore

DOCUMENT = Path(__file__).parents[4] / "docs" / "redis-keys.md"


@pytest.fixture
def memory(redis_client: RedisClient) -> Iterator[RedisClient]:
    """A client for changing `maxmemory`, which is reset afterwards."""
    yield redis_client
    redis_client.config_set("maxmemory", 0)


def test_with_full_memory_nothing_is_stored_in_part(store: TaskStore, memory: RedisClient) -> None:
    """redis#3893, durabull#64: `noeviction` refuses single writes; a script is refused before its first."""
    submit(store, memory)
    waiting = submission(memory)
    claimed = claim_one(store)
    publish(store, claimed, 0, 1)
    store.submit(submission(memory))
    before = dump(memory)
    memory.config_set("maxmemory", 1)
    for call in (
        lambda: store.submit(waiting),
        lambda: claim(store),
        lambda: publish(store, claimed, 1, 1),
        lambda: settle(store, claimed, 1),
    ):
        with pytest.raises(redis.exceptions.OutOfMemoryError):
            call()
    memory.config_set("maxmemory", 0)
    assert dump(memory) == before
    assert settle(store, claimed, 1, 1) == store.publish([final_write(claimed, 1, 1)])[0]


def test_with_full_memory_scripts_that_free_it_run(store: TaskStore, memory: RedisClient) -> None:
    ids = [submit(store, memory) for _ in range(4)]
    first, second, third = claim(store, 3, lease_seconds=-1)
    memory.config_set("maxmemory", 1)
    assert store.renew(owned([first]), 60) == Renewed()
    assert store.hand_back(owned([second])) == 1
    assert store.reap(SLUG, max_task_seconds=3600).returned == (third.task_id,)
    assert store.cancel(ids[3]) == "cancelled"
    snapshot = store.inspect(ids[3])
    assert snapshot is not None
    assert snapshot.status == "cancelled"
    assert store.queue_stats(SLUG).claimed == 1


def test_a_replica_refuses_every_change(store: TaskStore, redis_client: RedisClient) -> None:
    """After a failover the former primary answers READONLY, which is raised to the caller."""
    task_id = submit(store, redis_client)
    before = dump(redis_client)
    redis_client.replicaof("127.0.0.1", "1")
    try:
        with pytest.raises(redis.exceptions.ReadOnlyError):
            store.cancel(task_id)
        with pytest.raises(redis.exceptions.ReadOnlyError):
            claim(store)
        assert store.inspect(task_id) is not None
    finally:
        redis_client.replicaof("NO", "ONE")
    assert dump(redis_client) == before


def test_scripts_are_loaded_again_after_a_flush(store: TaskStore, redis_client: RedisClient) -> None:
    task_id = submit(store, redis_client)
    redis_client.script_flush()
    assert store.cancel(task_id) == "cancelled"


def lived(store: TaskStore, client: RedisClient) -> tuple[set[str], set[str]]:
    """All keys, and all fields of run hashes, that exist in the life of tasks with every feature, as
    patterns.
    """
    seen: set[str] = set()
    fields: set[str] = set()

    def record() -> None:
        seen.update(key.decode() for key in client.scan_iter())
        for key in client.scan_iter("tokenmill:run:*"):
            fields.update(field.decode() for field in client.hkeys(key))

    store.put_worker(WorkerRecord(name="worker-1", model="m", slug=SLUG, state="ready", started_at=0.0), 60)
    limits = TimeLimits(queue_timeout_seconds=60, ttft_timeout_seconds=60, timeout_seconds=60)
    asked = {"limits": limits, "webhook": "http://example.org/", "cancel_on_disconnect": True}
    ids = [submit(store, client, idempotency_key=str(n), **asked) for n in range(3)]
    Readers(client).read(ids[0], "reader", 60)
    store.renew(owned(claim(store, 1, lease_seconds=-1)), -1)
    reap(store)
    first, second = claim(store, 2)
    facts = {"waiting_for": "behind", "position": "1", "tokens_ahead": "2"}
    publish(
        store,
        first,
        0,
        1,
        scheduled="1",
        prompt_ids="[1]",
        sampling_defaults="{}",
        output_limit="{}",
        fingerprint="f",
        prompt_tokens="1",
        cached_tokens="1",
    )
    publish(store, second, 0, 0, **facts)
    record()
    settle(store, first, 1)
    settle(store, second, reason="error")
    store.cancel(ids[2])
    outbox = Outbox(client)
    outbox.retry(outbox.take(1, silence_seconds=60)[0], 60, Attempt(503, "status 503"))
    record()
    outbox.done(outbox.take(1, silence_seconds=0)[0], Attempt(200))
    record()
    return seen, fields


def test_the_document_lists_every_key_and_field(store: TaskStore, redis_client: RedisClient) -> None:
    text = DOCUMENT.read_text()
    in_code = set(re.findall(r"`([^`]+)`", text))
    documented = [re.compile(re.sub(r"<[a-z ]+>", ".+", name)) for name in in_code if ":" in name]
    documented += [
        re.compile(re.escape(name)) for name in (keys.LEASES, keys.WORKERS, keys.CONTROL, keys.WATCHED)
    ]
    seen, fields = lived(store, redis_client)
    assert {key for key in seen if not any(name.fullmatch(key) for name in documented)} == set()
    assert generic(fields) - in_code == set()


def test_the_document_lists_no_other_field(store: TaskStore, redis_client: RedisClient) -> None:
    table = DOCUMENT.read_text().partition("### Fields of")[2].partition("## Keys of queues")[0]
    listed = {
        name for row in re.findall(r"^\| (`[^|]+) \|", table, re.M) for name in re.findall(r"`([^`]+)`", row)
    }
    assert listed == generic(lived(store, redis_client)[1])


def generic(fields: set[str]) -> set[str]:
    """Each output has its own field for its end."""
    return {re.sub(r"^ended:\d+$", "ended:<index>", field) for field in fields}
