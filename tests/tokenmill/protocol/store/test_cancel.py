"""Cancelling ends exactly the named task, once, in any state."""

import json
from functools import partial

from rq import Queue
from rq.job import JobStatus
from rq.registry import CanceledJobRegistry, StartedJobRegistry

from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.tasks import (
    SLUG,
    claim,
    claim_one,
    fetch,
    log_of,
    owned,
    publish,
    settle,
    submission,
    submit,
    unchanged,
)
from tokenmill.protocol import keys
from tokenmill.protocol.messages import FinishedEvent, LogEntry, Usage, encode
from tokenmill.protocol.records import Cancelled, Lost, Renewed, Write
from tokenmill.protocol.store.task_store import TaskStore


def the_end(store: TaskStore, task_id: str) -> FinishedEvent:
    end = store.read_log(task_id)[-1]
    assert isinstance(end, FinishedEvent)
    assert end.done
    return end


def test_an_unknown_task_is_none(store: TaskStore, redis_client: RedisClient) -> None:
    for task_id in ("0" * 32, "", "a:b", "*"):
        assert unchanged(redis_client, partial(store.cancel, task_id)) is None


def test_a_waiting_task_leaves_its_queue(store: TaskStore, redis_client: RedisClient) -> None:
    first, given, last = (submission(redis_client, cost=cost) for cost in (1, 2, 4))
    for one in (first, given, last):
        store.submit(one)
    assert store.cancel(given.task_id) == "cancelled"
    assert Queue(given.queue, connection=redis_client).job_ids == [first.task_id, last.task_id]
    assert store.queue_stats(SLUG).waiting_cost == 5
    job = fetch(redis_client, given.task_id)
    assert job.get_status() is JobStatus.CANCELED
    assert CanceledJobRegistry(given.queue, connection=redis_client).get_job_ids() == [given.task_id]
    assert the_end(store, given.task_id).usage == Usage(prompt_tokens=0, completion_tokens=0).to_json()
    assert [claimed.task_id for claimed in claim(store)] == [first.task_id, last.task_id]


def test_a_running_task_is_taken_from_its_owner(store: TaskStore, redis_client: RedisClient) -> None:
    task_id = submit(store, redis_client)
    claimed = claim_one(store)
    publish(store, claimed, 0, 3, prompt_tokens="7", cached_tokens="4", scheduled="1")
    with redis_client.pubsub() as pubsub:
        pubsub.subscribe(keys.CONTROL)
        assert pubsub.get_message(timeout=60)["type"] == "subscribe"
        assert store.cancel(task_id) == "cancelled"
        assert json.loads(pubsub.get_message(timeout=60)["data"]) == {"cancel": task_id}
    assert unchanged(redis_client, lambda: publish(store, claimed, 3, 1)) == Cancelled()
    assert unchanged(redis_client, lambda: settle(store, claimed, 3)) == Cancelled()
    # A repeated write is not accepted either, so that the owner learns of the cancellation.
    assert unchanged(redis_client, lambda: publish(store, claimed, 0, 3)) == Cancelled()
    assert store.renew(owned([claimed]), 60) == Renewed(cancelled=frozenset({task_id}))
    assert store.hand_back(owned([claimed])) == 0
    assert StartedJobRegistry(claimed.queue, connection=redis_client).count == 0
    usage = Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=4)
    assert the_end(store, task_id).usage == usage.to_json()


def test_only_the_last_owner_learns_of_the_cancellation(store: TaskStore, redis_client: RedisClient) -> None:
    """vllm#31503: two workers that count one cancellation are as wrong as none."""
    task_id = submit(store, redis_client)
    old = claim_one(store, lease_seconds=-1)
    store.reap(SLUG, max_task_seconds=3600)
    new = claim_one(store)
    store.cancel(task_id)
    assert (publish(store, old, 0, 1), publish(store, new, 0, 1)) == (Lost(), Cancelled())
    assert store.renew(owned([old]), 60) == Renewed(lost=frozenset({task_id}))


def test_a_task_cancelled_between_attempts_is_lost_to_its_former_owner(
    store: TaskStore, redis_client: RedisClient
) -> None:
    task_id = submit(store, redis_client)
    old = claim_one(store, lease_seconds=-1)
    store.reap(SLUG, max_task_seconds=3600)
    store.cancel(task_id)
    assert publish(store, old, 0, 1) == Lost()


def test_the_message_equals_the_one_of_a_worker(store: TaskStore, redis_client: RedisClient) -> None:
    """Byte for byte, although a script builds it."""
    task_id = submit(store, redis_client)
    publish(store, claim_one(store), 0, 2, prompt_tokens="7")
    with redis_client.pubsub() as pubsub:
        pubsub.subscribe(keys.channel(task_id))
        assert pubsub.get_message(timeout=60)["type"] == "subscribe"
        store.cancel(task_id)
        messages = pubsub.get_message(timeout=60)["data"]
    entry = LogEntry.of_end("", "cancelled", usage=Usage(prompt_tokens=7, completion_tokens=2))
    assert messages == encode(entry.to_event(task_id, 2)).encode()
    assert log_of(store, task_id)[2] == entry


def test_a_second_cancellation_changes_nothing(store: TaskStore, redis_client: RedisClient) -> None:
    for claims in (False, True):
        task_id = submit(store, redis_client)
        if claims:
            claim_one(store)
        store.cancel(task_id)
        assert unchanged(redis_client, partial(store.cancel, task_id)) == "cancelled"
        assert len(store.read_log(task_id)) == 1


def test_after_the_end_the_final_status_is_returned(store: TaskStore, redis_client: RedisClient) -> None:
    for reason, status in (("stop", "completed"), ("error", "failed")):
        task_id = submit(store, redis_client)
        settle(store, claim_one(store), 0, 2, reason=reason)
        assert unchanged(redis_client, partial(store.cancel, task_id)) == status


def test_a_task_is_cancelled_between_attempts(store: TaskStore, redis_client: RedisClient) -> None:
    """A task that returned to its queue with a part of its text."""
    task_id = submit(store, redis_client)
    claimed = claim_one(store, lease_seconds=-1)
    publish(store, claimed, 0, 2, prompt_tokens="7")
    store.reap(SLUG, max_task_seconds=3600)
    assert store.cancel(task_id) == "cancelled"
    assert the_end(store, task_id).usage == Usage(prompt_tokens=7, completion_tokens=2).to_json()
    assert claim(store) == []


def test_usage_counts_tokens_and_not_ends(store: TaskStore, redis_client: RedisClient) -> None:
    """One of two outputs has ended: its end is an entry but not a token."""
    task_id = submit(store, redis_client, num_outputs=2)
    claimed = claim_one(store)
    publish(store, claimed, 0, 2)
    end = LogEntry.of_end("", "stop", index=1, done=False)
    store.publish([Write(task_id=task_id, owner=claimed.owner, first_seq=2, entries=(end,))])
    store.cancel(task_id)
    usage = the_end(store, task_id).usage
    assert usage is not None
    assert usage["completion_tokens"] == 2


def test_a_cancelled_task_expires(redis_client: RedisClient) -> None:
    """RQ keeps cancelled jobs for ever."""
    store = TaskStore(redis_client, retention_seconds=1000)
    task_id = submit(store, redis_client)
    store.cancel(task_id)
    for key in (keys.run(task_id), keys.log(task_id), f"rq:job:{task_id}"):
        assert 990_000 < redis_client.pttl(key) <= 1_000_000
