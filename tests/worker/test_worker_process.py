"""Worker processes that are killed or stopped: every task ends once, with the expected text."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from rq.job import Job
from rq.serializers import JSONSerializer

from tests.worker.fake_worker import PERMITS
from tests.worker.fakes import (
    SLUG,
    TIMEOUT_SECONDS,
    ended,
    expected_tokens,
    log_length,
    submit,
    tokens_of,
    until,
    wait_for_length,
)
from tests.worker.running import running
from tokenmill.client.streams import TokenStream
from tokenmill.protocol import keys
from tokenmill.protocol.messages import Event
from tokenmill.protocol.naming import DEFAULT_TENANT, queue_name
from tokenmill.protocol.store.task_store import TaskStore

ROOT = Path(__file__).parents[2]
LENGTH = 12
QUEUE = queue_name(SLUG, 2, DEFAULT_TENANT)

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(redis_url: str) -> Iterator[Start]:
    """Starts a worker process. Keywords are added to its environment."""
    started: list[subprocess.Popen[bytes]] = []

    def start_worker(**env: str) -> "subprocess.Popen[bytes]":
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.worker.fake_worker"],
                cwd=ROOT,
                env={
                    **os.environ,
                    "REDIS_URL": redis_url,
                    "TOKENMILL_LEASE_SECONDS": "1",
                    "TOKENMILL_GRACE_SECONDS": "0",
                    **env,
                },
            )
        )
        return started[-1]

    yield start_worker
    for process in started:
        process.kill()
        process.wait()


def submit_some(client: "redis.Redis", count: int) -> list[str]:
    return [
        submit(client, prompt_token_ids=(number + 1,), sampling={"max_tokens": LENGTH, "temperature": 0})
        for number in range(count)
    ]


def permit(client: "redis.Redis", steps: int) -> None:
    client.rpush(PERMITS, *range(steps))


def assert_all_completed(client: "redis.Redis", tasks: list[str]) -> None:
    """Each task ended once, with the expected text, and nothing is left over."""
    for number, task in enumerate(tasks):
        assert tokens_of(ended(client, task)) == expected_tokens([number + 1], LENGTH)
        job = Job.fetch(task, connection=client, serializer=JSONSerializer)
        assert job.get_status() == "finished"
        assert len(job.results()) == 1
        result: Any = job.return_value()
        assert result["usage"]["completion_tokens"] == LENGTH
    assert client.zcard(keys.LEASES) == 0
    assert client.zcard(f"rq:wip:{QUEUE}") == 0
    assert client.llen(f"rq:queue:{QUEUE}") == 0


def assert_handed_back(client: "redis.Redis", tasks: list[str]) -> None:
    """No task is owned. All wait in the order of their acceptance."""
    assert client.zcard(keys.LEASES) == 0
    queued: list[Any] = client.lrange(f"rq:queue:{QUEUE}", 0, -1)
    assert [task.decode() for task in queued] == tasks


def test_killed_during_decode(redis_url: str, redis_client: "redis.Redis", start: Start) -> None:
    """rq#1164: a job of a worker that was killed stayed `started` for ever."""
    tasks = submit_some(redis_client, 3)
    worker = start(GATED="1")
    permit(redis_client, 7)
    wait_for_length(redis_client, tasks[0], 5)
    worker.kill()
    worker.wait()
    before = {task: log_length(redis_client, task) for task in tasks}

    with running(redis_url):
        assert_all_completed(redis_client, tasks)

    assert 5 <= before[tasks[0]] < LENGTH, "it resumed from its log"
    snapshot = TaskStore(redis_client).inspect(tasks[0])
    assert snapshot is not None
    assert snapshot.attempt == 2


@pytest.mark.parametrize(
    "plan",
    [
        "intake:0:before",
        "intake:0:after",
        "publisher:0:before",
        "publisher:0:after",
        "publisher:3:before",
        "publisher:3:after",
        "publisher:9:before",
        "publisher:9:after",
        "leases:0:after",
    ],
)
def test_killed_between_any_two_calls(
    redis_url: str, redis_client: "redis.Redis", start: Start, plan: str
) -> None:
    """rq#2236, rq#1716: between some calls of a worker a job was in no list."""
    tasks = submit_some(redis_client, 6)
    worker = start(DIE=plan, GATED="1")
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while worker.poll() is None:
        assert time.monotonic() < deadline, "the worker reached its call"
        # One step for each publish, so that the publisher calls as often as the engine steps.
        length = sum(log_length(redis_client, task) for task in tasks)
        permit(redis_client, 1)

        def has_progress(length: int = length) -> bool:
            return worker.poll() is not None or sum(log_length(redis_client, one) for one in tasks) > length

        until(has_progress, "a step is published or the worker is dead")
    assert worker.returncode == -signal.SIGKILL

    with running(redis_url):
        assert_all_completed(redis_client, tasks)


def test_terminated_with_claimed_but_not_started(
    redis_url: str, redis_client: "redis.Redis", start: Start
) -> None:
    """rq#2236, celery#3802: SIGTERM between taking a job and starting it lost the job."""
    tasks = submit_some(redis_client, 6)
    worker = start(GATED="1")
    until(lambda: redis_client.zcard(keys.LEASES) == 5, "4 slots and a task of look-ahead are claimed")
    worker.terminate()
    until(lambda: TaskStore(redis_client).workers()[0].state == "draining", "it drains")
    permit(redis_client, 1)

    assert worker.wait(TIMEOUT_SECONDS) == 0
    assert_handed_back(redis_client, tasks)
    with running(redis_url):
        assert_all_completed(redis_client, tasks)


def test_terminated_in_mid_decode(redis_url: str, redis_client: "redis.Redis", start: Start) -> None:
    """celery#3802: a job that runs at SIGTERM is continued by another worker."""
    tasks = submit_some(redis_client, 3)
    worker = start(GATED="1")
    permit(redis_client, 6)
    wait_for_length(redis_client, tasks[0], 5)
    worker.terminate()
    until(lambda: TaskStore(redis_client).workers()[0].state == "draining", "it drains")
    behind = submit(redis_client)
    permit(redis_client, 1)
    assert worker.wait(TIMEOUT_SECONDS) == 0
    assert_handed_back(redis_client, [*tasks, behind])
    assert log_length(redis_client, tasks[0]) >= 5
    TaskStore(redis_client).cancel(behind)

    with running(redis_url):
        assert_all_completed(redis_client, tasks)


def test_terminated_within_grace_finishes_what_it_has(redis_client: "redis.Redis", start: Start) -> None:
    tasks = submit_some(redis_client, 3)
    worker = start(GATED="1", TOKENMILL_GRACE_SECONDS="60")
    until(lambda: redis_client.zcard(keys.LEASES) == 3, "all are claimed")
    worker.terminate()
    until(lambda: TaskStore(redis_client).workers()[0].state == "draining", "it drains")
    late = submit(redis_client)
    permit(redis_client, 40)

    assert worker.wait(TIMEOUT_SECONDS) == 0
    for number, task in enumerate(tasks):
        assert tokens_of(ended(redis_client, task)) == expected_tokens([number + 1], LENGTH)
    assert log_length(redis_client, late) == 0, "no more tasks are claimed"
    assert redis_client.lrange(f"rq:queue:{QUEUE}", 0, -1) == [late.encode()]


def test_terminated_twice_ends_at_once(redis_url: str, redis_client: "redis.Redis", start: Start) -> None:
    """The worker does not wait for the current step, and hands back its tasks."""
    tasks = submit_some(redis_client, 3)
    worker = start(GATED="1", TOKENMILL_GRACE_SECONDS="1000")
    permit(redis_client, 6)
    wait_for_length(redis_client, tasks[0], 5)
    worker.terminate()
    until(lambda: TaskStore(redis_client).workers()[0].state == "draining", "it drains")
    worker.terminate()

    assert worker.wait(TIMEOUT_SECONDS) == 0
    assert_handed_back(redis_client, tasks)
    with running(redis_url):
        assert_all_completed(redis_client, tasks)


def test_terminated_right_after_the_last_token(
    redis_url: str, redis_client: "redis.Redis", start: Start
) -> None:
    """celery#4354: a job that had ended ran again after the restart."""
    (task,) = submit_some(redis_client, 1)
    worker = start()
    ended(redis_client, task)
    worker.terminate()
    assert worker.wait(TIMEOUT_SECONDS) == 0

    with running(redis_url):
        other = submit(redis_client)
        ended(redis_client, other)
        assert_all_completed(redis_client, [task])
    snapshot = TaskStore(redis_client).inspect(task)
    assert snapshot is not None
    assert snapshot.attempt == 1


def test_a_worker_that_resumes_after_its_lease_writes_nothing(
    redis_url: str, redis_client: "redis.Redis", start: Start
) -> None:
    """celery#5935: a worker whose lease had lapsed and the one that took over both wrote."""
    tasks = submit_some(redis_client, 3)
    zombie = start(GATED="1")
    permit(redis_client, 5)
    wait_for_length(redis_client, tasks[0], 4)
    zombie.send_signal(signal.SIGSTOP)

    with running(redis_url):
        assert_all_completed(redis_client, tasks)
        logs = {task: ended(redis_client, task) for task in tasks}
        permit(redis_client, 100)
        zombie.send_signal(signal.SIGCONT)
        until(
            lambda: any(record.running == 0 for record in TaskStore(redis_client).workers()),
            "both report again",
        )
        redis_client.delete(PERMITS)
        zombie.terminate()
        assert zombie.wait(TIMEOUT_SECONDS) == 0

    assert {task: ended(redis_client, task) for task in tasks} == logs


def test_a_lease_shorter_than_the_job_is_kept(redis_client: "redis.Redis", start: Start) -> None:
    """celery#5935, celery#3270: a job that took longer than its lease was run by a second worker too.

    The current step takes three leases, the next ones are short.
    """
    tasks = submit_some(redis_client, 3)
    workers = [start(GATED="1"), start(GATED="1")]
    until(lambda: redis_client.zcard(keys.LEASES) == 3, "all are claimed")
    until(lambda: len(TaskStore(redis_client).workers()) == 2, "both are at work")
    began = redis_client.time()[0]
    until(lambda: redis_client.time()[0] > began + 3, "three leases have passed")
    permit(redis_client, 100)

    assert_all_completed(redis_client, tasks)
    assert [redis_client.hget(keys.run(task), "attempt") for task in tasks] == [b"1"] * 3
    for worker in workers:
        worker.terminate()
        assert worker.wait(TIMEOUT_SECONDS) == 0


def test_subscribers_of_a_killed_worker_receive_the_rest_from_the_next(
    redis_url: str, redis_client: "redis.Redis", start: Start
) -> None:
    """rq#1164: readers did not learn that a worker had been killed. Here they need not."""
    tasks = submit_some(redis_client, 3)
    worker = start(GATED="1")
    permit(redis_client, 5)
    wait_for_length(redis_client, tasks[0], 4)
    heard: dict[str, list[Event]] = {task: [] for task in tasks}
    readers = [
        threading.Thread(
            target=lambda task=task: heard[task].extend(TokenStream(redis_url, task)), daemon=True
        )
        for task in tasks
    ]
    for reader in readers:
        reader.start()
    until(lambda: redis_client.pubsub_numpat() + len(redis_client.pubsub_channels("tokenmill:tok:*")) == 3)
    worker.kill()
    redis_client.delete(PERMITS)
    with running(redis_url):
        for reader in readers:
            reader.join(TIMEOUT_SECONDS)

    assert heard == {task: ended(redis_client, task) for task in tasks}
    assert_all_completed(redis_client, tasks)


def test_a_stalled_step_ends_the_process(redis_url: str, redis_client: "redis.Redis", start: Start) -> None:
    """docling-jobkit#102, dask/distributed#6324: native code held the interpreter's lock for ever."""
    tasks = submit_some(redis_client, 3)
    worker = start(HANG="4", TOKENMILL_STALL_SECONDS="1")
    assert worker.wait(TIMEOUT_SECONDS) == 1

    with running(redis_url):
        assert_all_completed(redis_client, tasks)
