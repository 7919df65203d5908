"""Real worker processes that die of a request: it fails, and concurrent requests lose nothing."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis
from rq.job import Job
from rq.serializers import JSONSerializer

from tests.worker.deadly_worker import DEADLY, DEADLY_TEXT
from tests.worker.fakes import end_of, ended, expected_tokens, submit, tokens_of, until
from tokenmill.protocol import keys
from tokenmill.protocol.store.script_errors import POISON_ERROR

ROOT = Path(__file__).parents[2]
LENGTH = 12
DEATHS_TO_BLAME = 4
"""The first makes it a suspect. Three more happen while it runs alone."""


class Supervisor:
    """Restarts the worker whenever it ends."""

    def __init__(self, env: dict[str, str]) -> None:
        self.statuses: list[int] = []
        self._env = {**os.environ, **env}
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_closing.is_set():
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.worker.deadly_worker"], cwd=ROOT, env=self._env
            )
            try:
                while process.poll() is None and not self._is_closing.wait(0.02):
                    pass
                if process.returncode is not None:
                    self.statuses.append(process.returncode)
            finally:
                process.kill()
                process.wait()

    def close(self) -> None:
        self._is_closing.set()
        self._thread.join()


@contextmanager
def supervised(redis_url: str, how: str, at: int) -> Iterator[Supervisor]:
    supervisor = Supervisor(
        {
            "HOW": how,
            "AT": str(at),
            "REDIS_URL": redis_url,
            "TOKENMILL_LEASE_SECONDS": "1",
            "TOKENMILL_STALL_SECONDS": "1",
            "TOKENMILL_GRACE_SECONDS": "0",
        }
    )
    try:
        yield supervisor
    finally:
        supervisor.close()


def submit_one(client: "redis.Redis", number: int) -> str:
    sampling = {"max_tokens": LENGTH, "temperature": 0}
    return submit(client, prompt_token_ids=(number + 1,), sampling=sampling)


def assert_poisoned(client: "redis.Redis", task: str, num_tokens: int) -> None:
    end = end_of(client, task)
    assert (end.finish_reason, end.error) == ("error", POISON_ERROR.to_json())
    assert tokens_of(ended(client, task)) == expected_tokens([DEADLY], num_tokens)
    job = Job.fetch(task, connection=client, serializer=JSONSerializer)
    assert job.get_status() == "failed"
    assert len(job.results()) == 1
    assert client.zcard(keys.LEASES) == 0


@pytest.mark.parametrize(
    ("how", "at", "status", "num_deaths"),
    [
        ("exit", 0, 9, DEATHS_TO_BLAME),
        # The first worker stored tokens of it.
        ("exit", 3, 9, 1 + DEATHS_TO_BLAME),
        ("encode", 0, 9, DEATHS_TO_BLAME),
        ("stuck", 0, 1, DEATHS_TO_BLAME),
        ("hang", 0, 1, DEATHS_TO_BLAME),
        ("lost", 0, 70, DEATHS_TO_BLAME),
        # Exceptions in Python code: the worker stops normally and hands back its tasks.
        ("schedule", 0, 70, DEATHS_TO_BLAME),
        ("update", 0, 70, DEATHS_TO_BLAME),
        ("update:memory", 0, 70, DEATHS_TO_BLAME),
        ("update:exit", 0, 70, DEATHS_TO_BLAME),
        ("detokenize", 0, 70, DEATHS_TO_BLAME),
        ("publish", 0, 70, DEATHS_TO_BLAME),
    ],
)
def test_the_deadly_request_fails_and_the_others_finish(
    redis_url: str, redis_client: "redis.Redis", how: str, at: int, status: int, num_deaths: int
) -> None:
    """goose#35, hindsight#2675: a request that killed its process was retried for ever."""
    tasks = [submit_one(redis_client, number) for number in range(2)]
    sampling = {"max_tokens": LENGTH, "temperature": 0}
    if how in ("encode", "stuck"):
        deadly = submit(redis_client, prompt=DEADLY_TEXT, sampling=sampling)
    else:
        deadly = submit(redis_client, prompt_token_ids=(DEADLY,), sampling=sampling)
    tasks.append(submit_one(redis_client, 2))

    with supervised(redis_url, how, at) as supervisor:
        until(lambda: end_of(redis_client, deadly), "it is blamed")
        for number, task in enumerate(tasks):
            assert tokens_of(ended(redis_client, task)) == expected_tokens([number + 1], LENGTH)
            assert end_of(redis_client, task).finish_reason == "length"
        late = submit_one(redis_client, 7)
        assert tokens_of(ended(redis_client, late)) == expected_tokens([8], LENGTH)
        statuses = list(supervisor.statuses)

    assert_poisoned(redis_client, deadly, at)
    # The watchdog prints the stacks of running threads and ends the process. Printing may crash it first.
    ends = [status if how == "stuck" and one == -signal.SIGSEGV else one for one in statuses]
    # One more if the worker died before it recorded the end of another retry.
    assert ends in ([status] * num_deaths, [status] * (num_deaths + 1))
