"""The worker while connections break and Redis restarts or stops: nothing is lost."""

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.conftest import free_port, start_redis
from tests.worker.fakes import (
    FakeRunner,
    build_engine,
    ended,
    expected_tokens,
    submit,
    tokens_of,
    until,
    wait_for_length,
)
from tests.worker.running import make_worker, running
from tokenmill.protocol.store.task_store import TaskStore
from worker.connections import connect
from worker.output_queue import OutputQueue


def count_calls(target: Any, name: str) -> list[None]:
    """A list with one entry for each call of `target.name` from now on."""
    calls: list[None] = []
    method = getattr(target, name)

    def counting() -> None:
        calls.append(None)
        method()

    setattr(target, name, counting)
    return calls


def test_all_connections_are_killed_again_and_again(redis_url: str, redis_client: "redis.Redis") -> None:
    """redis-py#1573, rq#1836: after a lost connection workers ended, or missed all messages."""
    tasks = [submit(redis_client, prompt_token_ids=(n + 1,), sampling={"max_tokens": 60}) for n in range(8)]
    runner, permits = FakeRunner(), threading.Semaphore(0)
    runner.before_step = permits.acquire

    with running(redis_url, build_engine(runner)) as run:
        for round_number in range(1, 6):
            permits.release(8)
            wait_for_length(redis_client, tasks[0], round_number * 4)
            redis_client.client_kill_filter(skipme=True, _type="normal")
            redis_client.client_kill_filter(skipme=True, _type="pubsub")
        permits.release(1000)
        for number, task in enumerate(tasks):
            assert tokens_of(ended(redis_client, task)) == expected_tokens([number + 1], 60)
        assert run.status is None, "the worker lives"
        assert tokens_of(ended(redis_client, submit(redis_client))) == expected_tokens([1, 2, 3], 5)


def test_an_error_while_announcing_renews_the_connections(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failover an old connection may lead to a read-only replica."""
    worker = make_worker(redis_url)
    registration = worker.threads.registration
    before = registration.connection.client_id()

    def refuse(*_: Any, **__: Any) -> None:
        raise redis.ReadOnlyError("a replica now")

    monkeypatch.setattr(TaskStore, "put_worker", refuse)
    with pytest.raises(redis.ReadOnlyError):
        registration.announce()
    assert registration.connection.client_id() != before


def test_a_worker_starts_while_redis_is_away(tmp_path: Path) -> None:
    """A model takes long to load. The worker waits for Redis and keeps it."""
    port = free_port()
    connects: list[str] = []

    def counted(name: str) -> Any:
        client: Any = connect(f"redis://127.0.0.1:{port}/0", name)
        execute = client.connection_pool.get_connection

        def get_connection(*args: Any, **options: Any) -> Any:
            connects.append(name)
            return execute(*args, **options)

        client.connection_pool.get_connection = get_connection
        return client

    with running("", connect=counted) as run:
        # RQ asks for the address once. Each attempt to announce connects again.
        until(lambda: connects.count("rq") >= 3, "it tried again to announce itself")
        server = start_redis(tmp_path, port)
        try:
            with redis.Redis.from_url(server.url) as client:
                assert tokens_of(ended(client, submit(client))) == expected_tokens([1, 2, 3], 5)
                assert client.hget(run.worker.threads.registration.key, "birth")
                assert client.sismember("rq:workers", run.worker.threads.registration.key)
        finally:
            server.process.kill()
            server.process.wait()


def test_redis_restarts_under_the_worker(tmp_path: Path) -> None:
    """redis-py#1573, rq#1846: after a restart of Redis workers stalled, ended or missed all messages."""
    port = free_port()
    server = start_redis(tmp_path, port)
    runner, permits = FakeRunner(), threading.Semaphore(1)
    runner.before_step = permits.acquire
    try:
        with redis.Redis.from_url(server.url) as client, running(server.url, build_engine(runner)) as run:
            task = submit(client, sampling={"max_tokens": 30})
            wait_for_length(client, task, 1)
            server.process.kill()
            server.process.wait()
            permits.release(10)
            until(lambda: run.context.outputs.backlog >= 10, "tokens wait for Redis")
            server = start_redis(tmp_path, port)
            permits.release(100)
            assert tokens_of(ended(client, task)) == expected_tokens([1, 2, 3], 30)
            assert tokens_of(ended(client, submit(client))) == expected_tokens([1, 2, 3], 5)
    finally:
        server.process.kill()
        server.process.wait()


def test_the_loop_pauses_while_redis_is_away(tmp_path: Path) -> None:
    """No more is computed than the buffer can hold, and the loop does not count as stalled."""
    server = start_redis(tmp_path, free_port())
    runner = FakeRunner()
    try:
        with (
            redis.Redis.from_url(server.url) as client,
            running(server.url, build_engine(runner), outputs=OutputQueue(20)) as run,
        ):
            ticks = count_calls(run.context.watchdog, "tick")
            task = submit(client, sampling={"max_tokens": 190})
            wait_for_length(client, task, 1)
            server.process.send_signal(signal.SIGSTOP)
            until(lambda: run.context.outputs.is_full, "the buffer is full")
            num_ticks = len(ticks)
            until(lambda: len(ticks) >= num_ticks + 3, "the loop takes turns")
            assert run.context.outputs.backlog == 20
            server.process.send_signal(signal.SIGCONT)
            assert tokens_of(ended(client, task)) == expected_tokens([1, 2, 3], 190)
    finally:
        server.process.kill()
        server.process.wait()
