"""The order of claims, and the state of a claimed task, including for RQ's tools."""

import json
import zlib

from rq import Queue
from rq.executions import Execution
from rq.job import JobStatus
from rq.registry import CanceledJobRegistry, StartedJobRegistry

from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.passing_time import accept_earlier
from tests.tokenmill.protocol.store.tasks import (
    SLUG,
    claim,
    claim_one,
    fetch,
    publish,
    submission,
    submit,
    tokens,
)
from tokenmill.protocol import keys
from tokenmill.protocol.messages import JOB_FUNCTION, FinishedEvent
from tokenmill.protocol.store.task_store import TaskStore

MINUTE_US = 60_000_000


def test_within_a_class_the_oldest_goes_first(store: TaskStore, redis_client: RedisClient) -> None:
    ids = [submit(store, redis_client, tenant=f"tenant {n % 3}") for n in range(7)]
    assert [claimed.task_id for claimed in claim(store, 4)] == ids[:4]
    assert [claimed.task_id for claimed in claim(store, 4)] == ids[4:]
    assert claim(store, 4) == []


def test_lower_classes_go_first(store: TaskStore, redis_client: RedisClient) -> None:
    ids = {priority: submit(store, redis_client, priority=priority) for priority in (3, 1, 4, 0, 2)}
    assert [claimed.task_id for claimed in claim(store)] == [ids[priority] for priority in range(5)]


def test_a_waiting_task_gains_a_class_each_ageing_time(store: TaskStore, redis_client: RedisClient) -> None:
    """sglang#31954: without ageing a steady stream of favoured tasks starves the others."""
    old = submit(store, redis_client, priority=4)
    urgent = [submit(store, redis_client, priority=1) for _ in range(3)]
    accept_earlier(redis_client, old, 75)
    assert claim_one(store).task_id == urgent[0]
    # It gained three classes: now in the same class as the urgent ones, and older.
    accept_earlier(redis_client, old, 30)
    assert claim_one(store).task_id == old


def test_a_claim_returns_the_whole_task(store: TaskStore, redis_client: RedisClient) -> None:
    given = submission(redis_client, priority=1)
    store.submit(given)
    claimed = claim_one(store)
    assert (claimed.task_id, claimed.queue, claimed.priority) == (given.task_id, given.queue, 1)
    assert (claimed.attempt, claimed.entries) == (1, ())
    assert (claimed.prompt_token_ids, claimed.fingerprint) == (None, None)
    snapshot = store.inspect(given.task_id)
    assert snapshot is not None
    assert claimed.accepted_at == snapshot.accepted_at
    function, _, args, _ = json.loads(zlib.decompress(claimed.data))
    assert (function, args) == (JOB_FUNCTION, [{"id": given.task_id, "prompt": "hello"}])


def test_a_second_attempt_gets_what_the_first_stored(store: TaskStore, redis_client: RedisClient) -> None:
    submit(store, redis_client)
    first = claim_one(store, lease_seconds=-1)
    publish(store, first, 0, 3, prompt_ids="[5, 6, 7]", fingerprint="f1")
    store.reap(SLUG, max_task_seconds=3600)
    second = claim_one(store)
    assert second.attempt == 2
    assert second.owner != first.owner
    assert second.entries == tokens(0, 3)
    assert (second.prompt_token_ids, second.fingerprint) == ((5, 6, 7), "f1")


def test_rq_shows_the_job_as_started(store: TaskStore, redis_client: RedisClient) -> None:
    given = submission(redis_client)
    store.submit(given)
    redis_client.expire(f"rq:job:{given.task_id}", 1000)
    claimed = claim_one(store)
    job = fetch(redis_client, given.task_id)
    assert job.get_status() is JobStatus.STARTED
    assert job.worker_name == "worker-1"
    assert job.started_at is not None
    assert job.last_heartbeat == job.started_at
    # rq#1955 and others: a job whose hash expires while it runs leaves dangling ids.
    assert redis_client.ttl(f"rq:job:{given.task_id}") == -1
    assert Queue(given.queue, connection=redis_client).job_ids == []
    registry = StartedJobRegistry(given.queue, connection=redis_client)
    assert registry.get_job_and_execution_ids() == [(given.task_id, claimed.owner)]
    (execution,) = job.get_executions()
    assert (execution.id, execution.worker_name) == (claimed.owner, "worker-1")
    assert Execution.fetch(claimed.owner, given.task_id, redis_client).created_at == job.started_at


def test_counting_the_registry_ends_no_running_job(store: TaskStore, redis_client: RedisClient) -> None:
    """rq#2424, rq#1507: counting a registry cleans it up, and fails jobs that look abandoned."""
    given = submission(redis_client)
    store.submit(given)
    claim_one(store, lease_seconds=-1)
    registry = StartedJobRegistry(given.queue, connection=redis_client)
    registry.cleanup(timestamp=4_000_000_000)
    assert registry.count == 1
    assert fetch(redis_client, given.task_id).get_status() is JobStatus.STARTED


def test_empty_queues_are_not_read(store: TaskStore, redis_client: RedisClient) -> None:
    given = submission(redis_client)
    store.submit(given)
    assert redis_client.zrange(keys.queues(SLUG), 0, -1) == [given.queue.encode()]
    claim_one(store)
    of_lines = (keys.queues(SLUG), keys.shares(SLUG), keys.waiting(SLUG))
    of_class = (keys.lines(f"{SLUG}:2"), keys.unserved(f"{SLUG}:2"))
    for key in (keys.order(given.queue), keys.cost(given.queue), *of_lines, *of_class):
        assert not redis_client.exists(key)
    assert 0 < redis_client.pttl(keys.away(SLUG)) <= 3_600_000


def test_a_job_that_rq_cancelled_ends_when_claimed(store: TaskStore, redis_client: RedisClient) -> None:
    """rq#2160: a job that was cancelled while it waited must not run."""
    cancelled, kept = submission(redis_client), submission(redis_client)
    store.submit(cancelled)
    store.submit(kept)
    fetch(redis_client, cancelled.task_id).cancel()
    assert [claimed.task_id for claimed in claim(store)] == [kept.task_id]
    (event,) = store.read_log(cancelled.task_id)
    assert isinstance(event, FinishedEvent)
    assert (event.finish_reason, event.done) == ("cancelled", True)
    snapshot = store.inspect(cancelled.task_id)
    assert snapshot is not None
    assert snapshot.status == "cancelled"
    assert CanceledJobRegistry(cancelled.queue, connection=redis_client).get_job_ids() == [cancelled.task_id]


def test_a_job_that_rq_deleted_ends_and_stays_deleted(store: TaskStore, redis_client: RedisClient) -> None:
    task_id = submit(store, redis_client)
    fetch(redis_client, task_id).delete()
    assert claim(store) == []
    assert [event.seq for event in store.read_log(task_id)] == [0]
    # rq#1450: a partial hash of a deleted job breaks RQ's readers.
    assert not redis_client.exists(f"rq:job:{task_id}")
    assert store.cancel(task_id) == "cancelled"


def test_one_claim_ends_at_most_a_hundred_tasks(store: TaskStore, redis_client: RedisClient) -> None:
    """Redis serves no other client while a script runs."""
    given = submission(redis_client)
    for _ in range(250):
        submit(store, redis_client)
    Queue(given.queue, connection=redis_client).empty()
    kept = submit(store, redis_client)
    ended = []
    for _ in range(4):
        claimed = [one.task_id for one in claim(store)]
        ended.append((store.queue_stats(SLUG).totals["finished:cancelled"], claimed))
    assert ended == [(100, []), (200, []), (250, [kept]), (250, [])]


def test_the_wait_is_measured_on_the_clock_of_redis(store: TaskStore, redis_client: RedisClient) -> None:
    """With the clocks of the hosts a wait could be negative."""
    task_id = submit(store, redis_client)
    redis_client.hincrby(keys.run(task_id), "accepted_us", -MINUTE_US)
    assert 60 <= claim_one(store).waited_seconds < 120
    future = submit(store, redis_client)
    redis_client.hincrby(keys.run(future), "accepted_us", MINUTE_US)
    assert claim_one(store).waited_seconds == 0


def test_a_task_without_a_run_hash_does_not_block_the_queue(
    store: TaskStore, redis_client: RedisClient
) -> None:
    """rq#1955: a server that evicts keys leaves ids without a hash."""
    evicted, kept = submit(store, redis_client), submit(store, redis_client)
    redis_client.delete(keys.run(evicted))
    assert [claimed.task_id for claimed in claim(store)] == [kept]
    assert store.inspect(evicted) is None
    assert redis_client.pttl(f"rq:job:{evicted}") > 0


def test_a_claim_is_for_one_model(store: TaskStore, redis_client: RedisClient) -> None:
    submit(store, redis_client)
    assert store.claim("other-000000", worker="w", max_tasks=1, lease_seconds=60) == []
