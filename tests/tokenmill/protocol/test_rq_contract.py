"""Key names and statuses equal RQ's own, and RQ's commands show Tokenmill's tasks correctly."""

import os
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from rq import Queue
from rq.defaults import RQ_KEY_PREFIX
from rq.executions import Execution, ExecutionRegistry
from rq.job import Job, JobStatus
from rq.registry import (
    CanceledJobRegistry,
    FailedJobRegistry,
    FinishedJobRegistry,
    StartedJobRegistry,
)
from rq.results import Result
from rq.utils import utcformat

from tests.redis_client import RedisClient
from tests.tokenmill.protocol.store.tasks import claim, claim_one, fetch, publish, settle, submission
from tokenmill.protocol import rq_keys
from tokenmill.protocol.records import JOB_ID, Accepted
from tokenmill.protocol.store import scripting
from tokenmill.protocol.store.task_store import TaskStore


def test_keys_equal_those_of_rq(redis_client: RedisClient) -> None:
    queue, task_id = Queue("q", connection=redis_client), "0a"
    assert RQ_KEY_PREFIX == "rq"
    assert Queue.redis_queues_keys == rq_keys.QUEUES
    assert rq_keys.queue("q") == queue.key
    assert rq_keys.job(task_id) == Job.key_for(task_id)
    assert rq_keys.results(task_id) == Result.get_key(task_id)
    assert rq_keys.executions(task_id) == ExecutionRegistry(task_id, connection=redis_client).key
    execution = Execution("e", task_id, redis_client, worker_name="w")
    assert rq_keys.execution(f"{task_id}:e") == execution.key
    assert rq_keys.worker_executions("w") == execution.worker_executions_key
    for ours, theirs in (
        (rq_keys.wip, StartedJobRegistry),
        (rq_keys.finished, FinishedJobRegistry),
        (rq_keys.failed, FailedJobRegistry),
        (rq_keys.canceled, CanceledJobRegistry),
    ):
        assert ours("q") == theirs("q", connection=redis_client).key


def test_statuses_equal_those_of_rq() -> None:
    assert Result.Type.SUCCESSFUL.value == rq_keys.RESULT_SUCCESSFUL
    assert Result.Type.FAILED.value == rq_keys.RESULT_FAILED
    statuses = {JobStatus.QUEUED, JobStatus.STARTED, JobStatus.FINISHED, JobStatus.FAILED, JobStatus.CANCELED}
    text = "".join(map(scripting.source, scripting.NAMES))
    assert all(f"'{status.value}'" in text for status in statuses)


@pytest.mark.parametrize("task_id", ["a" * 32, "A-b_9", "a:b", "a b", "", "é"])
def test_task_ids_are_valid_job_ids(redis_client: RedisClient, task_id: str) -> None:
    try:
        Job(id=task_id, connection=redis_client).id = task_id
    except ValueError:
        assert not JOB_ID.fullmatch(task_id)
    else:
        assert JOB_ID.fullmatch(task_id)


def test_no_key_has_braces() -> None:
    """In a cluster a brace would be a hash tag."""
    assert not re.search("[{}]", "".join(scripting.CONSTANTS.values()))


@pytest.mark.parametrize(
    "moment",
    [
        datetime(1970, 1, 1, tzinfo=UTC),
        datetime(1999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
        datetime(2000, 2, 29, 12, tzinfo=UTC),
        datetime(2024, 2, 29, 0, 0, 0, 1, tzinfo=UTC),
        datetime(2026, 3, 1, tzinfo=UTC),
        datetime(2100, 2, 28, 23, 59, 59, tzinfo=UTC),
        datetime(2100, 3, 1, tzinfo=UTC),
    ],
)
def test_times_have_the_format_of_rq(redis_client: RedisClient, moment: datetime) -> None:
    formats = Path(scripting.__file__).with_name("scripts") / "parts" / "formats.lua"
    microseconds = round((moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1e6)
    script = formats.read_text() + "\nreturn utcformat(tonumber(ARGV[2]))"
    assert redis_client.eval(script, 0, 0, microseconds).decode() == utcformat(moment)


def test_rq_info_shows_the_right_numbers_and_ends_no_job(
    store: TaskStore, redis_client: RedisClient, redis_url: str
) -> None:
    """In a process of its own; the leases have lapsed."""
    given = [submission(redis_client) for _ in range(10)]
    for submitted in given:
        store.submit(submitted)
    claimed = claim(store, 5, lease_seconds=-1)
    for task, reason in zip(claimed, ("stop", "length", "error"), strict=False):
        settle(store, task, 0, 1, reason=reason)
    store.cancel(given[9].task_id)
    program = Path(sys.executable).with_name("rq")
    environment = {**os.environ, "COLUMNS": "120"}
    done = subprocess.run(
        [program, "info", "--url", redis_url, "--raw"],
        env=environment, capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert f"queue {given[0].queue} 4, 2 executing, 2 finished, 1 failed" in done.stdout
    for task in claimed[3:]:
        assert fetch(redis_client, task.task_id).get_status() is JobStatus.STARTED
        assert publish(store, task, 0, 1) == Accepted()


def test_a_blocking_read_of_results_returns(store: TaskStore, redis_client: RedisClient) -> None:
    """`Job.latest_result(timeout=...)` reads the stream of results."""
    given = submission(redis_client)
    store.submit(given)
    settle(store, claim_one(store))
    result = fetch(redis_client, given.task_id).latest_result(timeout=2)
    assert result is not None
    assert result.type is Result.Type.SUCCESSFUL


def test_redis_accepts_every_script(redis_client: RedisClient) -> None:
    for name in scripting.NAMES:
        redis_client.script_load(scripting.source(name))


def test_every_lua_file_is_a_script_or_a_part() -> None:
    folder = Path(scripting.__file__).with_name("scripts")
    files = {file.relative_to(folder).with_suffix("").as_posix() for file in folder.rglob("*.lua")}
    assert files == {f"parts/{name}" for name in scripting.PART_NAMES} | scripting.NAMES


def test_the_protocol_imports_only_the_standard_library() -> None:
    """`-S` hides site-packages, so that importing anything else fails."""
    code = "import tokenmill.protocol.store.task_store, tokenmill.client.sse, tokenmill.process.hold_unusable"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[3]
    )
    assert (done.returncode, done.stderr) == (0, "")
