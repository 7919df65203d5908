"""Time limits of waiting tasks: a task ends once, as `timeout`."""

import pytest

from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.tasks import (
    SLUG,
    claim,
    claim_one,
    fetch,
    publish,
    reap,
    submission,
    submit,
    waiting,
)
from tokenmill.protocol import keys
from tokenmill.protocol.limits import TIME_LIMIT_NAMES, TimeLimits, timeout_error
from tokenmill.protocol.messages import FinishedEvent
from tokenmill.protocol.records import Lost, Reaped
from tokenmill.protocol.store.task_store import TaskStore


def passed(client: RedisClient, task_id: str) -> None:
    """Its limits of one minute have passed."""
    client.zincrby(keys.deadlines(SLUG), -60, task_id)


def nothing_is_left(client: RedisClient) -> bool:
    names = (
        "tokenmill:order:*",
        "tokenmill:cost:*",
        "tokenmill:deadlines:*",
        "tokenmill:queues:*",
        "rq:queue:*",
    )
    return not [key for name in names for key in client.scan_iter(name)]


@pytest.mark.parametrize("name", TIME_LIMIT_NAMES)
def test_a_waiting_task_ends_when_its_limit_passes(
    store: TaskStore, redis_client: RedisClient, name: str
) -> None:
    """Without any worker."""
    task_id = submit(store, redis_client, limits=TimeLimits(**{name: 60}))
    other = submit(store, redis_client)
    assert reap(store) == Reaped()
    passed(redis_client, task_id)

    assert reap(store).timed_out == (task_id,)

    (end,) = store.read_log(task_id)
    assert isinstance(end, FinishedEvent)
    assert (end.finish_reason, end.done) == ("timeout", True)
    assert end.error == timeout_error(name, "60").to_json()
    assert (end.error["code"], name in end.error["message"]) == ("timeout", True)
    snapshot = store.inspect(task_id)
    assert snapshot is not None
    assert snapshot.status == "failed"
    result = fetch(redis_client, task_id).latest_result()
    assert result is not None
    assert name in (result.exc_string or "")
    assert reap(store) == Reaped()
    store.cancel(other)
    assert nothing_is_left(redis_client)


def test_limits_count_from_the_acceptance(store: TaskStore, redis_client: RedisClient) -> None:
    task_id = submit(store, redis_client, limits=TimeLimits(queue_timeout_seconds=0.25, timeout_seconds=3))
    accepted_us = int(redis_client.hget(keys.run(task_id), "accepted_us") or 0)
    assert redis_client.zscore(keys.deadlines(SLUG), task_id) == pytest.approx(
        accepted_us / 1e6 + 0.25, abs=1e-5
    )


def test_a_task_without_limits_has_no_deadline(store: TaskStore, redis_client: RedisClient) -> None:
    submit(store, redis_client)
    assert not redis_client.exists(keys.deadlines(SLUG))


def test_a_claimed_task_is_ended_by_its_worker_only(store: TaskStore, redis_client: RedisClient) -> None:
    """Claimed tasks have no deadline in Redis, and ended ones cannot be claimed."""
    limits = TimeLimits(timeout_seconds=60)
    first, second = (submit(store, redis_client, limits=limits) for _ in range(2))
    claimed = claim_one(store)
    assert claimed.task_id == first
    assert redis_client.zrange(keys.deadlines(SLUG), 0, -1) == [second.encode()]
    passed(redis_client, second)
    assert reap(store).timed_out == (second,)
    assert claim(store) == []
    assert publish(store, claimed, 0, 1) != Lost()


@pytest.mark.parametrize("how", ["hand_back", "lapse"])
def test_the_time_with_a_worker_counts(store: TaskStore, redis_client: RedisClient, how: str) -> None:
    task_id = submit(store, redis_client, limits=TimeLimits(timeout_seconds=60))
    before = redis_client.zscore(keys.deadlines(SLUG), task_id)
    claimed = claim_one(store, lease_seconds=-1)
    publish(store, claimed, 0, 2, prompt_tokens="3", scheduled="0")
    if how == "hand_back":
        store.hand_back({task_id: claimed.owner})
    else:
        assert reap(store).returned == (task_id,)
    assert redis_client.zscore(keys.deadlines(SLUG), task_id) == before
    passed(redis_client, task_id)

    assert reap(store).timed_out == (task_id,)
    end = store.read_log(task_id)[-1]
    assert isinstance(end, FinishedEvent)
    assert end.usage is not None
    assert (end.seq, end.usage["completion_tokens"]) == (2, 2), "what was generated is kept"


def test_a_limit_that_was_met_does_not_apply_again(store: TaskStore, redis_client: RedisClient) -> None:
    limits = TimeLimits(queue_timeout_seconds=10, ttft_timeout_seconds=20, timeout_seconds=30)
    task_id = submit(store, redis_client, limits=limits)
    begin = redis_client.zscore(keys.deadlines(SLUG), task_id)
    assert begin is not None
    after: list[float | None] = []
    for num_tokens, facts in ((0, {}), (0, {"scheduled": "0"}), (1, {})):
        claimed = claim_one(store)
        assert claimed.has_started == bool(after[1:])
        publish(store, claimed, 0, num_tokens, **facts)
        store.hand_back({task_id: claimed.owner})
        score = redis_client.zscore(keys.deadlines(SLUG), task_id)
        after.append(score and round(score - begin))
    assert after == [0, 10, 20], "not started; started; a token"


def test_the_error_names_the_limit_that_passed_first(store: TaskStore, redis_client: RedisClient) -> None:
    limits = TimeLimits(queue_timeout_seconds=60, ttft_timeout_seconds=0.5, timeout_seconds=60)
    task_id = submit(store, redis_client, limits=limits)
    passed(redis_client, task_id)
    reap(store)
    end = store.read_log(task_id)[-1]
    assert isinstance(end, FinishedEvent)
    assert end.error == timeout_error("ttft_timeout_seconds", "0.5").to_json()


def test_one_call_ends_at_most_a_hundred_tasks(store: TaskStore, redis_client: RedisClient) -> None:
    for _ in range(150):
        submit(store, redis_client, limits=TimeLimits(queue_timeout_seconds=0))
    assert [len(reap(store).timed_out) for _ in range(3)] == [100, 50, 0]
    assert waiting(redis_client, submission(redis_client).queue) == []


def test_a_cancelled_task_has_no_deadline(store: TaskStore, redis_client: RedisClient) -> None:
    task_id = submit(store, redis_client, limits=TimeLimits(timeout_seconds=60))
    store.cancel(task_id)
    assert nothing_is_left(redis_client)


def test_the_deadline_of_a_task_without_run_hash_is_removed(
    store: TaskStore, redis_client: RedisClient
) -> None:
    task_id = submit(store, redis_client, limits=TimeLimits(timeout_seconds=0))
    redis_client.delete(keys.run(task_id))
    assert reap(store).timed_out == ()
    assert not redis_client.exists(keys.deadlines(SLUG))


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf")])
def test_a_limit_that_is_not_a_number_of_seconds_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="timeout_seconds"):
        TimeLimits(timeout_seconds=seconds)
