"""A submission is atomic, stored once however often it is sent, and equals what RQ would have stored."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from rq import Queue
from rq.job import JobStatus

from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.tasks import (
    MODEL,
    SLUG,
    claim,
    dump,
    fetch,
    snapshot_of,
    submission,
    submit,
    unchanged,
)
from tokenmill.protocol import keys
from tokenmill.protocol.messages import JOB_FUNCTION
from tokenmill.protocol.naming import queue_name
from tokenmill.protocol.records import IdempotencyConflict, QueueFull, Submission, Submitted
from tokenmill.protocol.store.task_store import TaskStore


def test_rq_reads_the_job(store: TaskStore, redis_client: RedisClient) -> None:
    given = submission(redis_client)
    assert store.submit(given) == Submitted(given.task_id, replayed=False)
    job = fetch(redis_client, given.task_id)
    assert job.get_status() is JobStatus.QUEUED
    assert job.func_name == JOB_FUNCTION
    assert job.args == [{"id": given.task_id, "prompt": "hello"}]
    assert job.origin == given.queue
    assert job.enqueued_at is not None
    assert abs(job.enqueued_at.timestamp() - snapshot_of(store, given.task_id).accepted_at) < 1
    queue = Queue(given.queue, connection=redis_client)
    assert queue.job_ids == [given.task_id]
    assert [q.name for q in Queue.all(connection=redis_client)] == [given.queue]


def test_a_repeated_submission_stores_nothing(store: TaskStore, redis_client: RedisClient) -> None:
    given = submission(redis_client)
    store.submit(given)
    assert unchanged(redis_client, lambda: store.submit(given)) == Submitted(given.task_id, replayed=True)


def test_an_idempotency_key_returns_the_first_task_for_the_same_body(
    store: TaskStore, redis_client: RedisClient
) -> None:
    first = submission(redis_client, idempotency_key="k", body_digest="a")
    store.submit(first)
    again = submission(redis_client, idempotency_key="k", body_digest="a")
    assert unchanged(redis_client, lambda: store.submit(again)) == Submitted(first.task_id, replayed=True)


def test_an_idempotency_key_refuses_another_body(store: TaskStore, redis_client: RedisClient) -> None:
    store.submit(submission(redis_client, idempotency_key="k", body_digest="a"))
    other = submission(redis_client, idempotency_key="k", body_digest="b")
    before = dump(redis_client)
    with pytest.raises(IdempotencyConflict):
        store.submit(other)
    assert dump(redis_client) == before


def test_idempotency_keys_belong_to_a_tenant(store: TaskStore, redis_client: RedisClient) -> None:
    store.submit(submission(redis_client, idempotency_key="k", body_digest="a"))
    other = submission(redis_client, tenant="someone else", idempotency_key="k", body_digest="b")
    assert not store.submit(other).replayed


def test_an_idempotency_key_is_free_again_when_its_task_is_gone(
    store: TaskStore, redis_client: RedisClient
) -> None:
    first = submission(redis_client, idempotency_key="k", body_digest="a")
    store.submit(first)
    redis_client.delete(keys.run(first.task_id))
    assert not store.submit(submission(redis_client, idempotency_key="k", body_digest="b")).replayed


def test_the_task_limit_counts_all_queues_of_the_model(store: TaskStore, redis_client: RedisClient) -> None:
    submit(store, redis_client, priority=1, max_waiting=2)
    submit(store, redis_client, priority=3, max_waiting=2)
    refused = submission(redis_client, max_waiting=2, idempotency_key="k")
    before = dump(redis_client)
    with pytest.raises(QueueFull) as full:
        store.submit(refused)
    assert (full.value.limit_met, full.value.depth, full.value.tokens) == ("tasks", 2, 20)
    # The key is not stored either: the next attempt must not count as a replay.
    assert dump(redis_client) == before
    claim(store, 1)
    assert not store.submit(refused).replayed


def test_the_token_limit_counts_all_waiting_tasks(store: TaskStore, redis_client: RedisClient) -> None:
    limits = {"max_waiting": 100, "max_waiting_tokens": 100}
    submit(store, redis_client, priority=1, tenant="a", cost=60, **limits)
    submit(store, redis_client, priority=3, tenant="b", cost=40, **limits)
    refused = submission(redis_client, cost=1, idempotency_key="k", **limits)
    with pytest.raises(QueueFull) as full:
        unchanged(redis_client, lambda: store.submit(refused))
    assert (full.value.limit_met, full.value.depth, full.value.tokens) == ("tokens", 2, 100)
    claim(store, 1)
    # 40 wait: what fits is accepted, what does not is refused.
    with pytest.raises(QueueFull):
        store.submit(submission(redis_client, cost=61, **limits))
    assert not store.submit(refused).replayed


def test_a_task_larger_than_the_limit_is_accepted_if_none_waits(
    store: TaskStore, redis_client: RedisClient
) -> None:
    """Otherwise it could never run, although a worker is idle."""
    submit(store, redis_client, cost=1000, max_waiting_tokens=100)
    for cost in (0, 1000):
        with pytest.raises(QueueFull):
            store.submit(submission(redis_client, cost=cost, max_waiting_tokens=100))
    claim(store, 1)
    submit(store, redis_client, cost=1000, max_waiting_tokens=100)


def test_a_replay_is_answered_when_the_queue_is_full(store: TaskStore, redis_client: RedisClient) -> None:
    given = submission(redis_client, max_waiting=1, idempotency_key="k")
    store.submit(given)
    assert store.submit(given).replayed


def test_the_limit_holds_for_concurrent_submissions(redis_url: str, redis_client: RedisClient) -> None:
    """sglang#33858: each one over the limit is answered, and no more than the limit are accepted."""

    def try_one(given: Submission) -> bool:
        with redis.Redis.from_url(redis_url) as client:
            try:
                return not TaskStore(client).submit(given).replayed
            except QueueFull:
                return False

    given = [submission(redis_client, max_waiting=10) for _ in range(40)]
    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(try_one, given)) == 10
    assert redis_client.zcard(keys.order(queue_name(SLUG, 2, "default"))) == 10


def test_acceptance_times_increase_while_the_clock_is_stopped(
    store: TaskStore, redis_client: RedisClient
) -> None:
    """Redis's clock may be set back; the order of acceptance must not change."""
    future = 4_000_000_000_000_000
    redis_client.set(keys.clock(SLUG), future)
    ids = [submit(store, redis_client) for _ in range(3)]
    order = redis_client.zrange(keys.order(queue_name(SLUG, 2, "default")), 0, -1, withscores=True)
    assert order == [(task_id.encode(), future + 1 + n) for n, task_id in enumerate(ids)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"task_id": 'a"b'},
        {"task_id": "a:b"},
        {"task_id": ""},
        {"cost": -1},
        {"job_fields": {}},
        {"queue": "q"},
    ],
)
def test_values_that_are_invalid_in_a_key_or_message_are_refused(
    redis_client: RedisClient, wrong: dict[str, object]
) -> None:
    (name,) = wrong
    good = submission(redis_client)
    fields = {field: getattr(good, field) for field in Submission.__dataclass_fields__}
    with pytest.raises(ValueError, match=name):
        Submission(**(fields | wrong))


def test_a_snapshot_has_the_submitted_values(store: TaskStore, redis_client: RedisClient) -> None:
    task_id = submit(store, redis_client, metadata='{"a": "\\ud800"}', priority=4)
    snapshot = store.inspect(task_id)
    assert snapshot is not None
    assert (snapshot.metadata, snapshot.priority, snapshot.model) == ('{"a": "\\ud800"}', 4, MODEL)
    assert (snapshot.status, snapshot.claimed, snapshot.attempt) == ("queued", False, 0)


def test_no_tenant_takes_all_of_the_task_limit(store: TaskStore, redis_client: RedisClient) -> None:
    """A tenant may have at most as many tasks as are left free, so another tenant's first task fits."""
    limits: dict[str, object] = {"max_waiting": 10, "share_limits": True}

    def submit_many(tenant: str) -> None:
        for _ in range(100):
            submit(store, redis_client, tenant=tenant, **limits)

    def fill(tenant: str) -> QueueFull:
        with pytest.raises(QueueFull) as full:
            submit_many(tenant)
        return full.value

    full = fill("a")
    assert (full.limit_met, full.limit_of, full.tenant_depth, full.depth) == ("tasks", "tenant", 5, 5)
    full = fill("b")
    assert (full.limit_of, full.tenant_depth, full.depth) == ("tenant", 3, 8)
    assert fill("c").tenant_depth == 1
    assert fill("d").limit_of == "all"
    # A claim makes room.
    assert len(claim(store, 3)) == 3
    submit(store, redis_client, tenant="e", **limits)


def test_no_tenant_takes_all_of_the_token_limit(store: TaskStore, redis_client: RedisClient) -> None:
    limits: dict[str, object] = {"max_waiting_tokens": 1000, "share_limits": True}
    for _ in range(5):
        submit(store, redis_client, tenant="a", cost=100, **limits)
    with pytest.raises(QueueFull) as full:
        submit(store, redis_client, tenant="a", cost=100, **limits)
    assert (full.value.limit_met, full.value.limit_of, full.value.tenant_tokens) == ("tokens", "tenant", 500)
    # The first task of a tenant is accepted at any size; otherwise a large one never would be.
    submit(store, redis_client, tenant="b", cost=900, **limits)
    with pytest.raises(QueueFull) as full:
        submit(store, redis_client, tenant="b", cost=1, **limits)
    assert (full.value.limit_met, full.value.limit_of) == ("tokens", "all")
