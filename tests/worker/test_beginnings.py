"""A worker that starts while Redis is away waits for it, since loading a model takes minutes."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.conftest import free_port, start_redis
from tests.worker.fakes import SLUG, ended, expected_tokens, new_metrics, submit, tokens_of, until
from tests.worker.running import running
from tokenmill.protocol.store.task_store import TaskStore
from worker import __main__ as process
from worker.connections import connect


def rq_workers(url: str) -> str:
    rq = Path(sys.executable).parent / "rq"
    return subprocess.run(
        [rq, "info", "--only-workers", "--raw", "--url", url], capture_output=True, text=True, check=True
    ).stdout


def test_redis_starts_after_the_worker(tmp_path: Path) -> None:
    port = free_port()
    url = f"redis://127.0.0.1:{port}/0"
    metrics = new_metrics()
    with running(url, metrics=metrics) as run:
        until(lambda: metrics.value("redis_errors_total") >= 10, "every thread has tried")
        server = start_redis(tmp_path, port)
        try:
            with redis.Redis.from_url(url) as client:
                assert tokens_of(ended(client, submit(client))) == expected_tokens([1, 2, 3], 5)
                records = until(lambda: TaskStore(client).workers(), "the API sees it")
                assert [(record.slug, record.state) for record in records] == [(SLUG, "ready")]
            assert run.worker.name in rq_workers(url), "RQ's tools see it"
            assert run.status is None
            run.worker.stop("the test's end")
            assert run.wait() == 0
        finally:
            server.process.kill()
            server.process.wait()


class Refusing:
    """A call that Redis rejects `times` times."""

    def __init__(self, times: int) -> None:
        self.times = times

    def __call__(self) -> None:
        self.times -= 1
        if self.times >= 0:
            raise redis.ReadOnlyError("a replica now")


@pytest.mark.parametrize(("times", "seconds", "works"), [(0, 60, True), (3, 60, True), (10**9, 0.05, False)])
def test_calls_of_the_startup_are_repeated(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, times: int, seconds: float, works: bool
) -> None:
    monkeypatch.setattr(process, "REDIS_RETRY_SECONDS", 0.01)
    client: Any = connect(redis_url, "loading")
    before = client.client_id()
    call = Refusing(times)
    assert process._try_until(call, client, seconds) is works
    assert (client.client_id() == before) == (times == 0), "on a new connection"
