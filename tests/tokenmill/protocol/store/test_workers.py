"""Records of workers, which expire when workers stop reporting."""

import dataclasses
import json
import time

from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.tasks import SLUG
from tokenmill.protocol import keys
from tokenmill.protocol.records import ModelCard, WorkerRecord
from tokenmill.protocol.store.task_store import TaskStore

RECORD = WorkerRecord(
    name="host-1", model="m", slug=SLUG, state="ready", started_at=1.5, detail="é", running=3, waiting=2
)
WATCHDOG_SECONDS = 60


def test_a_record_is_returned_as_stored(store: TaskStore) -> None:
    other = dataclasses.replace(RECORD, name="host-2", slug="other-000000", state="loading")
    store.put_worker(RECORD, 60)
    store.put_worker(other, 60)
    assert sorted(store.workers(), key=lambda record: record.name) == [RECORD, other]


def test_a_record_of_a_newer_version_can_be_read(store: TaskStore, redis_client: RedisClient) -> None:
    """During a rolling upgrade old and new workers read each other's records."""
    store.put_worker(RECORD, 60)
    newer = {**json.loads(RECORD.to_json()), "num_devices": 8}
    redis_client.set(keys.worker(RECORD.name), json.dumps(newer))
    assert store.workers() == [RECORD]


def test_a_newer_record_replaces_an_older_one(store: TaskStore) -> None:
    store.put_worker(RECORD, 60)
    assert store.queue_stats(SLUG).num_ready_workers == 1
    draining = dataclasses.replace(RECORD, state="draining")
    store.put_worker(draining, 60)
    assert store.workers() == [draining]
    assert store.queue_stats(SLUG).num_ready_workers == 0


def test_a_worker_removes_its_record(store: TaskStore, redis_client: RedisClient) -> None:
    store.put_worker(RECORD, 60)
    store.drop_worker(RECORD.name)
    store.drop_worker(RECORD.name)
    assert store.workers() == []
    assert redis_client.keys() == []


def test_the_record_of_a_silent_worker_expires(store: TaskStore, redis_client: RedisClient) -> None:
    store.put_worker(RECORD, 0.001)
    deadline = time.monotonic() + WATCHDOG_SECONDS
    while store.workers() and time.monotonic() < deadline:
        pass
    assert store.workers() == []
    assert store.queue_stats(SLUG).num_ready_workers == 0
    store.put_worker(dataclasses.replace(RECORD, name="host-2"), 60)
    assert redis_client.zrange(keys.WORKERS, 0, -1) == [b"host-2"]


def test_a_model_card_persists(store: TaskStore, redis_client: RedisClient) -> None:
    assert store.model_card(SLUG) is None
    card = ModelCard(
        model="m",
        vocab_size=10,
        max_model_len=20,
        max_prompt_tokens=19,
        has_chat_template=True,
        fingerprint="f",
    )
    store.put_model_card(SLUG, card)
    assert store.model_card(SLUG) == card
    assert redis_client.ttl(keys.model_card(SLUG)) == -1
