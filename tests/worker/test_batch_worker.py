"""A whole worker in this process: cancels, RQ's commands, a dead engine, and its public records."""

import subprocess
import sys
import threading
from pathlib import Path

import redis
from rq.command import send_shutdown_command, send_stop_job_command
from rq.job import Job
from rq.serializers import JSONSerializer

from engine.errors import DeviceLost
from tests.worker.fakes import (
    MODEL,
    SLUG,
    FakeRunner,
    WordTokenizer,
    build_engine,
    end_of,
    ended,
    expected_tokens,
    log_length,
    served_model,
    submit,
    tokens_of,
    until,
    wait_for_length,
)
from tests.worker.running import running
from tokenmill.protocol import keys
from tokenmill.protocol.naming import DEFAULT_TENANT, queue_name
from tokenmill.protocol.store.task_store import TaskStore
from worker.loop import Load

LONG = {"max_tokens": 190}


def step_until_all_run(client: "redis.Redis", permits: threading.Semaphore, tasks: list[str]) -> None:
    """Step until every task has a token in its log."""
    for _ in range(100):
        length = log_length(client, tasks[0])
        if all(log_length(client, task) for task in tasks):
            return
        permits.release()
        wait_for_length(client, tasks[0], length + 1)
    raise AssertionError("a task has no token after 100 steps")


def test_a_dead_engine_hands_everything_back(redis_url: str, redis_client: "redis.Redis") -> None:
    """transformers PR45898: a worker whose engine is dead must not look healthy."""
    runner = FakeRunner()

    def die() -> None:
        if runner.num_steps == 2:
            raise DeviceLost("the device is gone")

    runner.before_step = die
    tasks = [submit(redis_client, prompt_token_ids=(n + 1,)) for n in range(5)]

    with running(redis_url, build_engine(runner)) as run:
        assert run.wait() == 70

    assert all(log_length(redis_client, task) < 5 for task in tasks)
    assert redis_client.zcard(keys.LEASES) == 0
    with running(redis_url):
        for number, task in enumerate(tasks):
            assert tokens_of(ended(redis_client, task)) == expected_tokens([number + 1], 5)


def test_cancel_at_the_third_token(redis_url: str, redis_client: "redis.Redis") -> None:
    """rq#2160: the end of a running job overwrote its cancel."""
    runner, permits = FakeRunner(), threading.Semaphore(3)
    runner.before_step = permits.acquire
    task = submit(redis_client, sampling={"max_tokens": 50})

    with running(redis_url, build_engine(runner)) as run:
        wait_for_length(redis_client, task, 3)
        assert TaskStore(redis_client).cancel(task) == "cancelled"
        events = ended(redis_client, task)
        until(lambda: not run.context.owned_tasks, "the worker drops it")
        permits.release(100)
        until(lambda: run.worker.threads.loop.load == Load(), "nothing runs")

    assert len(tokens_of(events)) == 3
    assert events == ended(redis_client, task)
    assert runner.num_steps <= 4
    job = Job.fetch(task, connection=redis_client, serializer=JSONSerializer)
    assert job.get_status() == "canceled"


def test_cancel_between_claim_and_start(redis_url: str, redis_client: "redis.Redis") -> None:
    """rq#2160, rq#2292: a job that was cancelled after it was taken from the queue ran anyway."""
    tokenizer, may_encode, encoding = WordTokenizer(), threading.Event(), threading.Event()

    class Slow(WordTokenizer):
        def encode(self, text: str) -> list[int]:
            encoding.set()
            assert may_encode.wait(30)
            return super().encode(text)

    runner = FakeRunner()
    task = submit(redis_client, prompt="some words")

    with running(redis_url, build_engine(runner), model=served_model(Slow())) as run:
        assert encoding.wait(30)
        assert TaskStore(redis_client).cancel(task) == "cancelled"
        until(lambda: not run.context.owned_tasks, "the worker drops it")
        may_encode.set()
        other = submit(redis_client, prompt=tokenizer.decode([1]))
        ended(redis_client, other)
        assert tokens_of(ended(redis_client, task)) == []

    assert runner.num_steps == 5, "only the steps of the other task"


def test_stop_job_command_of_rq(redis_url: str, redis_client: "redis.Redis") -> None:
    """rq#2227: the stop command was ignored for all jobs but one."""
    runner, permits = FakeRunner(), threading.Semaphore(1)
    runner.before_step = permits.acquire
    first, second = (submit(redis_client, sampling=LONG) for _ in range(2))

    with running(redis_url, build_engine(runner)):
        step_until_all_run(redis_client, permits, [first, second])
        send_stop_job_command(redis_client, second, serializer=JSONSerializer)
        assert end_of(redis_client, second).finish_reason == "cancelled"
        permits.release(1000)
        assert end_of(redis_client, first).finish_reason == "length"


def test_shutdown_command_of_rq(redis_url: str, redis_client: "redis.Redis") -> None:
    with running(redis_url) as run:
        name = run.worker.name
        until(lambda: redis_client.pubsub_numsub(f"rq:pubsub:{name}")[0][1], "the worker listens")
        send_shutdown_command(redis_client, name)
        assert run.wait() == 0


def test_rq_info_shows_what_runs(redis_url: str, redis_client: "redis.Redis") -> None:
    """RQ's own command. It must not change what it shows."""
    runner, permits = FakeRunner(), threading.Semaphore(1)
    runner.before_step = permits.acquire
    tasks = [submit(redis_client, sampling=LONG) for _ in range(3)]
    program = str(Path(sys.executable).with_name("rq"))

    with running(redis_url, build_engine(runner)) as run:
        step_until_all_run(redis_client, permits, tasks)
        until(lambda: redis_client.hget(f"rq:worker:{run.worker.name}", "state") == b"busy", "busy")
        shown = subprocess.run(
            [program, "info", "--url", redis_url], capture_output=True, text=True, check=True
        ).stdout
        permits.release(1000)
        for task in tasks:
            assert tokens_of(ended(redis_client, task)) == expected_tokens([1, 2, 3], 190)

    lines = shown.splitlines()
    queue = queue_name(SLUG, 2, DEFAULT_TENANT)
    assert any(line.startswith(queue) and "0, 3 executing" in line for line in lines)
    assert any(line.startswith(run.worker.name) and ": busy " in line for line in lines)


def test_the_record_shows_the_state_of_the_worker(redis_url: str, redis_client: "redis.Redis") -> None:
    store = TaskStore(redis_client)
    runner, permits = FakeRunner(), threading.Semaphore(1)
    runner.before_step = permits.acquire
    task = submit(redis_client)

    with running(redis_url, build_engine(runner)) as run:
        record = until(lambda: next((one for one in store.workers() if one.running), None), "one runs")
        assert (record.name, record.state, record.model) == (run.worker.name, "ready", MODEL)
        run.worker.stop("test")
        until(lambda: store.workers()[0].state == "draining", "draining")
        permits.release(100)
        ended(redis_client, task)
        assert run.wait() == 0

    assert store.workers() == []
    assert redis_client.smembers("rq:workers") == set()
