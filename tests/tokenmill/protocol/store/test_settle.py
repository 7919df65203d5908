"""A task ends once, at the same moment for its readers and for RQ, and is kept for its retention."""

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
from rq.job import JobStatus
from rq.registry import FailedJobRegistry, FinishedJobRegistry, StartedJobRegistry
from rq.results import Result

from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.tasks import (
    HARD_TEXTS,
    RESULT,
    SLUG,
    claim,
    claim_one,
    fetch,
    final_write,
    log_of,
    publish,
    settle,
    submit,
    unchanged,
)
from tokenmill.protocol import keys
from tokenmill.protocol.records import Accepted, Cancelled, Claimed, Lost
from tokenmill.protocol.store.task_store import TaskStore


def test_a_settlement_ends_the_task_for_readers_and_rq(
    store: TaskStore, redis_client: RedisClient, claimed: Claimed
) -> None:
    publish(store, claimed, 0, 2)
    assert settle(store, claimed, 2, 1, reason="length") == Accepted()
    job = fetch(redis_client, claimed.task_id)
    assert job.get_status() is JobStatus.FINISHED
    assert job.return_value() == RESULT
    assert job.ended_at is not None
    result = job.latest_result()
    assert result is not None
    assert (result.type, result.worker_name) == (Result.Type.SUCCESSFUL, "worker-1")
    assert result.execution_id == claimed.owner
    assert result.execution_started_at is not None
    assert result.execution_ended_at is not None
    assert abs((result.execution_ended_at - job.ended_at).total_seconds()) < 1e-5
    assert result.execution_started_at <= result.execution_ended_at
    assert FinishedJobRegistry(claimed.queue, connection=redis_client).get_job_ids() == [claimed.task_id]
    assert StartedJobRegistry(claimed.queue, connection=redis_client).count == 0
    snapshot = store.inspect(claimed.task_id)
    assert snapshot is not None
    assert (snapshot.status, snapshot.claimed) == ("completed", False)
    assert snapshot.finished_at is not None
    assert log_of(store, claimed.task_id)[-1].members
    assert not redis_client.exists(keys.LEASES)


def test_a_failed_task_keeps_its_partial_result(
    store: TaskStore, redis_client: RedisClient, claimed: Claimed
) -> None:
    settle(store, claimed, 0, 2, reason="error")
    job = fetch(redis_client, claimed.task_id)
    assert job.get_status() is JobStatus.FAILED
    assert job.return_value() is None
    result = job.latest_result()
    assert result is not None
    assert (result.type, result.exc_string, result.return_value) == (Result.Type.FAILED, "it broke", RESULT)
    assert FailedJobRegistry(claimed.queue, connection=redis_client).get_job_ids() == [claimed.task_id]
    snapshot = store.inspect(claimed.task_id)
    assert snapshot is not None
    assert snapshot.status == "failed"


def test_a_repeated_settlement_is_accepted_and_counted_once(
    store: TaskStore, redis_client: RedisClient, claimed: Claimed
) -> None:
    settle(store, claimed, 0, 3)
    assert unchanged(redis_client, lambda: settle(store, claimed, 0, 3)) == Accepted()
    assert store.queue_stats(SLUG).totals["finished:stop"] == 1
    assert len(fetch(redis_client, claimed.task_id).results()) == 1


def test_nothing_is_stored_after_the_end(
    store: TaskStore, redis_client: RedisClient, claimed: Claimed
) -> None:
    settle(store, claimed, 0, 3)
    assert unchanged(redis_client, lambda: publish(store, claimed, 4, 1)) == Lost()


def test_the_end_is_not_visible_before_its_result(
    store: TaskStore, redis_client: RedisClient, redis_url: str
) -> None:
    """rq#1724, rq#1997: pollers saw `finished` without a result."""
    ids = [submit(store, redis_client) for _ in range(50)]

    def poll() -> list[Any]:
        seen = []
        with redis.Redis.from_url(redis_url) as client:
            for task_id in ids:
                while fetch(client, task_id).get_status() is not JobStatus.FINISHED:
                    pass
                seen.append(fetch(client, task_id).return_value())
        return seen

    with ThreadPoolExecutor(2) as pool:
        pollers = [pool.submit(poll) for _ in range(2)]
        for claimed in claim(store):
            settle(store, claimed, 0, 1)
        assert [poller.result(timeout=60) for poller in pollers] == [[RESULT] * 50] * 2


@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_a_job_that_rq_ended_is_not_settled(
    store: TaskStore, redis_client: RedisClient, claimed: Claimed, how: str
) -> None:
    """rq#2292: `Job.cancel()` of a running job only edits Redis, and the worker overwrote it at the end."""
    publish(store, claimed, 0, 2)
    getattr(fetch(redis_client, claimed.task_id), how)()
    assert settle(store, claimed, 2) == Cancelled()
    snapshot = store.inspect(claimed.task_id)
    assert snapshot is not None
    assert snapshot.status == "cancelled"
    assert [event.seq for event in store.read_log(claimed.task_id)] == [0, 1, 2]
    assert StartedJobRegistry(claimed.queue, connection=redis_client).count == 0
    assert redis_client.exists(f"rq:job:{claimed.task_id}") == (how == "cancel")
    assert not redis_client.exists(f"rq:execution:{claimed.task_id}:{claimed.owner}")


def test_all_keys_of_a_task_expire_together(redis_client: RedisClient) -> None:
    """romm#3195, docling-serve#518: results outlive logs, or failed jobs fill the memory for a year."""
    store = TaskStore(redis_client, retention_seconds=1000)
    task_id = submit(store, redis_client, idempotency_key="k")
    settle(store, claim_one(store), 0, 2)
    of_the_task = [key for key in redis_client.scan_iter() if task_id.encode() in key]
    (record,) = redis_client.scan_iter("tokenmill:idem:*")
    assert len(of_the_task) == 4
    for key in (*of_the_task, record):
        assert 990_000 < redis_client.pttl(key) <= 1_000_000


def test_an_end_without_a_token_is_not_a_first_token(store: TaskStore, claimed: Claimed) -> None:
    settle(store, claimed, reason="error")
    snapshot = store.inspect(claimed.task_id)
    assert snapshot is not None
    assert snapshot.first_token_at is None


def test_totals_add_up(store: TaskStore, redis_client: RedisClient) -> None:
    for _ in range(3):
        submit(store, redis_client)
    first, second, third = claim(store)
    settle(store, first, 0, 4)
    settle(store, second, 0, 2, reason="timeout")
    publish(store, third, 0, 3, prompt_tokens="8")
    store.cancel(third.task_id)
    assert store.queue_stats(SLUG).totals == {
        "submitted": 3,
        "finished:stop": 1,
        "finished:timeout": 1,
        "finished:cancelled": 1,
        "prompt_tokens": 3 + 3 + 8,
        "completion_tokens": 4 + 2 + 3,
    }


def test_a_result_may_be_any_json(store: TaskStore, redis_client: RedisClient, claimed: Claimed) -> None:
    """Lua's cjson turns `[]` into `{}` and truncates long integers; JSON encoded in Python is not changed."""
    result = {"outputs": [], "long": 2**63 + 1, "text": "".join(HARD_TEXTS)}
    write = final_write(claimed)
    assert write.settlement is not None
    settlement = dataclasses.replace(write.settlement, result=json.dumps(result, ensure_ascii=False))
    store.publish([dataclasses.replace(write, settlement=settlement)])
    assert fetch(redis_client, claimed.task_id).return_value() == result


@pytest.mark.parametrize("is_client_error", [False, True])
def test_errors_of_the_client_are_counted_separately(
    store: TaskStore, redis_client: RedisClient, is_client_error: bool
) -> None:
    submit(store, redis_client)
    write = final_write(claim_one(store), reason="error")
    assert write.settlement is not None
    settlement = dataclasses.replace(write.settlement, is_client_error=is_client_error)

    store.publish([dataclasses.replace(write, settlement=settlement)])

    totals = store.queue_stats(SLUG).totals
    assert (totals["finished:error"], totals.get("client_errors", 0)) == (1, int(is_client_error))
