"""A task that is lost or cancelled leaves every part of the worker at once, and is counted as what it was."""

import random
import threading
from collections import Counter

import pytest
import redis

from engine.outputs import StepReport
from tests.worker.fakes import (
    SLUG,
    FakeRunner,
    build_engine,
    ended,
    expected_tokens,
    log_length,
    new_metrics,
    submit,
    tokens_of,
    until,
    wait_for_length,
)
from tests.worker.running import running
from tokenmill.protocol import keys
from tokenmill.protocol.store.task_store import TaskStore
from worker.loop import Load


class Ends:
    """An observer that counts finish reasons."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()

    def observe(self, report: StepReport) -> None:
        self.reasons.update(str(one.reason) for one in report.finished)


def reap_what_is_held(client: "redis.Redis", task: str) -> None:
    """Reap a task as if its worker had been away for longer than a lease."""
    client.zadd(keys.LEASES, {task: 1})
    TaskStore(client).reap(SLUG, max_task_seconds=86400)


def test_a_task_that_is_claimed_again_runs_once(redis_url: str, redis_client: "redis.Redis") -> None:
    """bullmq#3183: a worker that was away longer than its lease continued an attempt that it had lost."""
    runner, permits = FakeRunner(), threading.Semaphore(3)
    runner.before_step = permits.acquire
    engine = build_engine(runner)
    task = submit(redis_client, sampling={"max_tokens": 20})

    metrics = new_metrics()
    with running(redis_url, engine, metrics=metrics) as run:
        wait_for_length(redis_client, task, 3)
        first = redis_client.hget(keys.run(task), "owner")
        reap_what_is_held(redis_client, task)
        # No step runs, so only the claim, or a renewal before it, shows that the first attempt is lost.
        until(lambda: redis_client.hget(keys.run(task), "owner") not in (None, first), "it is claimed again")
        # The loop is in a step of the first attempt, and must not start another before it has both messages.
        until(lambda: len(run.context.inbox) == 2, "the loop has messages of both attempts")
        permits.release(2)
        until(lambda: log_length(redis_client, task) > 3, "the second attempt runs")
        assert [request.partition(":")[0] for request in engine._requests] == [task]
        permits.release(100)
        assert tokens_of(ended(redis_client, task)) == expected_tokens([1, 2, 3], 20)
        until(lambda: not run.context.owned_tasks, "no task is owned")
        until(lambda: run.worker.threads.loop.load == Load(), "nothing runs")
        assert metrics.value("tasks_lost_total") == 1


@pytest.mark.parametrize("heard", [True, False])
def test_every_cancel_of_a_running_request_is_counted(
    redis_url: str, redis_client: "redis.Redis", heard: bool
) -> None:
    """vllm#31503: aborted requests were missing in the finished counter. Both ways to learn of a cancel."""
    num_tasks, ends, chance = 40, Ends(), random.Random(7)
    tasks = [submit(redis_client, sampling={"max_tokens": 4900}) for _ in range(num_tasks)]
    runner, permits = FakeRunner(), threading.Semaphore(0)
    runner.before_step = permits.acquire
    engine = build_engine(runner, max_num_seqs=num_tasks, num_kv_blocks=60000, max_model_len=5000)

    def has_running(number: int) -> bool:
        permits.release()
        return run.worker.threads.loop.load == Load(num_running=number)

    metrics = new_metrics()
    with running(redis_url, engine, observers=(ends,), metrics=metrics) as run:
        if not heard:
            run.worker.threads.services["listener"].stop()
            until(lambda: run.worker.threads.services["listener"].join(1), "the listener has stopped")
        until(lambda: has_running(num_tasks), "all run")
        chance.shuffle(tasks)
        for task in tasks:
            permits.release()
            assert TaskStore(redis_client).cancel(task) == "cancelled"
        until(lambda: has_running(0), "nothing runs")
        assert ends.reasons == {"cancelled": num_tasks}
        assert metrics.value("tasks_lost_total") == 0
        assert len(run.context.owned_tasks) == 0
