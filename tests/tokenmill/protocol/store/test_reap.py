"""The reaper ends overdue tasks, applies changes of RQ's tools, and drops expired records."""

import time

import pytest
from rq import Queue
from rq.job import JobStatus
from rq.registry import (
    CanceledJobRegistry,
    FailedJobRegistry,
    FinishedJobRegistry,
)
from rq.serializers import JSONSerializer

from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.passing_time import accept_earlier
from tests.tokenmill.protocol.store.tasks import (
    SLUG,
    claim,
    claim_one,
    fetch,
    publish,
    reap,
    settle,
    submission,
    submit,
    waiting,
)
from tokenmill.protocol import keys
from tokenmill.protocol.messages import FinishedEvent, Usage
from tokenmill.protocol.records import Reaped
from tokenmill.protocol.store.script_errors import MAX_WAIT_ERROR
from tokenmill.protocol.store.task_store import TaskStore

WATCHDOG_SECONDS = 60


def test_an_overdue_task_ends_as_timeout(store: TaskStore, redis_client: RedisClient) -> None:
    given = submission(redis_client)
    store.submit(given)
    claimed = claim_one(store, lease_seconds=-1)
    publish(store, claimed, 0, 2, prompt_tokens="7")
    reaped = reap(store, max_task_seconds=0)
    assert (reaped.returned, reaped.timed_out) == ((given.task_id,), (given.task_id,))
    end = store.read_log(given.task_id)[-1]
    assert end == FinishedEvent(
        id=given.task_id,
        seq=2,
        text="",
        finish_reason="timeout",
        done=True,
        usage=Usage(prompt_tokens=7, completion_tokens=2).to_json(),
        error=MAX_WAIT_ERROR.to_json(),
    )
    job = fetch(redis_client, given.task_id)
    assert job.get_status() is JobStatus.FAILED
    result = job.latest_result()
    assert result is not None
    assert result.exc_string == MAX_WAIT_ERROR.message
    assert FailedJobRegistry(given.queue, connection=redis_client).get_job_ids() == [given.task_id]
    assert waiting(redis_client, given.queue) == []
    snapshot = store.inspect(given.task_id)
    assert snapshot is not None
    assert snapshot.status == "failed"
    assert reap(store, max_task_seconds=0) == Reaped()


def test_only_overdue_tasks_end(store: TaskStore, redis_client: RedisClient) -> None:
    old, young = submit(store, redis_client), submit(store, redis_client)
    accept_earlier(redis_client, old, 7200)
    assert reap(store).timed_out == (old,)
    assert claim_one(store).task_id == young


@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_a_job_that_rq_removed_from_the_list_ends(
    store: TaskStore, redis_client: RedisClient, how: str
) -> None:
    given = [submission(redis_client) for _ in range(3)]
    for one in given:
        store.submit(one)
    getattr(fetch(redis_client, given[1].task_id), how)()
    assert reap(store).cancelled == (given[1].task_id,)
    assert [event.seq for event in store.read_log(given[1].task_id)] == [0]
    assert waiting(redis_client, given[0].queue) == [given[0].task_id, given[2].task_id]


def test_emptying_an_rq_queue_ends_all_its_tasks(store: TaskStore, redis_client: RedisClient) -> None:
    """`rq empty` deletes the jobs of a queue."""
    given = [submission(redis_client) for _ in range(3)]
    for one in given:
        store.submit(one)
    Queue(given[0].queue, connection=redis_client).empty()
    assert reap(store).cancelled == tuple(one.task_id for one in given)


def test_a_job_that_rq_requeued_does_not_run_again(store: TaskStore, redis_client: RedisClient) -> None:
    """`rq requeue` of a failed job: its log has an end that readers have seen."""
    given = submission(redis_client)
    store.submit(given)
    settle(store, claim_one(store), 0, 1, reason="error")
    fetch(redis_client, given.task_id).requeue()
    assert claim(store) == []
    reap(store)
    job = fetch(redis_client, given.task_id)
    assert job.get_status() is JobStatus.FAILED
    assert FailedJobRegistry(given.queue, connection=redis_client).get_job_ids() == [given.task_id]
    assert waiting(redis_client, given.queue) == []


def test_a_job_that_is_not_a_task_fails(store: TaskStore, redis_client: RedisClient) -> None:
    """Any client of Redis can enqueue a job; no function that a job names is called."""
    given = submission(redis_client)
    store.submit(given)
    queue = Queue(given.queue, connection=redis_client, serializer=JSONSerializer)
    foreign = queue.enqueue("os.getcwd")
    assert [claimed.task_id for claimed in claim(store)] == [given.task_id]
    reap(store)
    job = fetch(redis_client, foreign.id)
    assert job.get_status() is JobStatus.FAILED
    assert FailedJobRegistry(given.queue, connection=redis_client).get_job_ids() == [foreign.id]
    assert 0 < redis_client.ttl(f"rq:job:{foreign.id}") <= 3600
    assert waiting(redis_client, given.queue) == []


def test_a_job_missing_in_rqs_list_is_added_again(store: TaskStore, redis_client: RedisClient) -> None:
    ids = [submit(store, redis_client) for _ in range(6)]
    queue = submission(redis_client).queue
    for missing in (ids[0], ids[2], ids[3], ids[5]):
        redis_client.lrem(f"rq:queue:{queue}", 0, missing)
    assert reap(store) == Reaped()
    assert waiting(redis_client, queue) == ids


def test_one_call_ends_at_most_a_hundred_tasks(store: TaskStore, redis_client: RedisClient) -> None:
    """Redis serves no other client while a script runs."""
    for n in range(150):
        submit(store, redis_client, priority=n % 2)
    assert [len(reap(store, max_task_seconds=0).timed_out) for _ in range(3)] == [100, 50, 0]


@pytest.mark.parametrize("how", ["emptied", "unlisted", "listed"])
def test_one_call_repairs_at_most_a_hundred_jobs(
    store: TaskStore, redis_client: RedisClient, how: str
) -> None:
    """Regression: three thousand deleted jobs blocked Redis for most of a second."""
    given = [submission(redis_client, priority=n % 2) for n in range(250)]
    for one in given:
        store.submit(one)
    queues = [Queue(name, connection=redis_client) for name in sorted({one.queue for one in given})]
    if how == "emptied":
        for queue in queues:
            queue.empty()
        assert [len(reap(store).cancelled) for _ in range(4)] == [100, 100, 50, 0]
        return
    num_listed = []
    if how == "unlisted":
        redis_client.delete(*(queue.key for queue in queues))
    else:
        for number in range(250):
            redis_client.rpush(queues[0].key, f"foreign-{number}")
    for _ in range(4):
        num_listed.append(sum(queue.count for queue in queues))
        assert reap(store) == Reaped()
    assert num_listed == ([0, 100, 200, 250] if how == "unlisted" else [500, 400, 300, 250])
    assert sum(len(waiting(redis_client, queue.name)) for queue in queues) == 250


def test_expired_ids_leave_the_registries(redis_client: RedisClient) -> None:
    """romm#3195: registries with expired jobs; RQ itself never trims cancelled ones."""
    store = TaskStore(redis_client, retention_seconds=0.01)
    given = [submission(redis_client) for _ in range(3)]
    for one in given:
        store.submit(one)
    store.cancel(given[2].task_id)
    for claimed, reason in zip(claim(store), ("stop", "error"), strict=True):
        settle(store, claimed, reason=reason)
    queue = given[0].queue
    registries = [
        kind(queue, connection=redis_client)
        for kind in (FinishedJobRegistry, FailedJobRegistry, CanceledJobRegistry)
    ]
    deadline = time.monotonic() + WATCHDOG_SECONDS
    while Queue.all(connection=redis_client) and time.monotonic() < deadline:
        reap(store)
    assert [registry.get_job_count(cleanup=False) for registry in registries] == [0, 0, 0]
    assert Queue.all(connection=redis_client) == []
    assert not redis_client.exists(keys.shown(SLUG))


def test_a_queue_is_shown_while_anything_of_it_exists(store: TaskStore, redis_client: RedisClient) -> None:
    """`rq info` iterates over the list of queues; a queue that left it with its last waiting task hides
    running ones.
    """
    given = submission(redis_client)
    store.submit(given)
    redis_client.zadd(keys.shown(SLUG), {given.queue: 0})
    claimed = claim_one(store)
    reap(store)
    assert [queue.name for queue in Queue.all(connection=redis_client)] == [given.queue]
    redis_client.zadd(keys.shown(SLUG), {given.queue: 0})
    settle(store, claimed)
    reap(store)
    assert [queue.name for queue in Queue.all(connection=redis_client)] == [given.queue]
