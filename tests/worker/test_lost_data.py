"""A worker whose Redis loses all data or stops: it writes its records again, and logs an outage once."""

import logging
import signal
from pathlib import Path

import pytest
import redis

from tests.conftest import free_port, start_redis
from tests.worker.fakes import (
    MODEL,
    SLUG,
    VOCAB_SIZE,
    ExportedMetrics,
    build_engine,
    ended,
    expected_tokens,
    new_metrics,
    served_model,
    submit,
    tokens_of,
    until,
)
from tests.worker.running import TIMING, Running
from tokenmill.protocol.records import ModelCard
from tokenmill.protocol.store.task_store import TaskStore
from worker.batch_worker import BatchWorker
from worker.connections import connect
from worker.context import WorkerContext

CARD = ModelCard(
    model=MODEL,
    vocab_size=VOCAB_SIZE,
    max_model_len=200,
    max_prompt_tokens=199,
    has_chat_template=True,
    fingerprint="f1",
)


def work(url: str, metrics: ExportedMetrics | None = None) -> Running:
    context = WorkerContext(
        model=served_model(),
        connect=lambda name: connect(url, name),
        metrics=metrics or new_metrics(),
        card=CARD,
        timing=TIMING,
        arm=lambda _: None,
    )
    return Running(BatchWorker(build_engine(), context))


def end(run: Running) -> None:
    run.worker.stop("the test's end")
    run.worker.stop("the test's end")
    run.wait()


def test_the_records_of_a_worker_are_written_again(redis_url: str, redis_client: "redis.Redis") -> None:
    """After a loss of data the API did not know the model's limits until a worker was restarted."""
    store = TaskStore(redis_client)
    run = work(redis_url)
    try:
        for _ in range(2):
            until(lambda: store.model_card(SLUG), "the card is there")
            until(store.workers, "the record is there")
            until(lambda: redis_client.smembers("rq:workers"), "RQ's tools show the worker")
            redis_client.flushall()
        until(lambda: store.model_card(SLUG) == CARD, "the card is there again")
        until(store.workers, "the record is there again")
        until(lambda: redis_client.smembers("rq:workers"), "RQ's tools show the worker again")
        task = submit(redis_client, prompt_token_ids=(1,))
        assert tokens_of(ended(redis_client, task)) == expected_tokens([1], 5)
    finally:
        end(run)


def test_the_card_of_a_later_worker_stays(redis_url: str, redis_client: "redis.Redis") -> None:
    store = TaskStore(redis_client)
    later = ModelCard(
        model=MODEL,
        vocab_size=VOCAB_SIZE,
        max_model_len=200,
        max_prompt_tokens=199,
        has_chat_template=True,
        fingerprint="f2",
    )
    store.put_model_card(SLUG, later)
    store.restore_model_card(SLUG, CARD)
    assert store.model_card(SLUG) == later


def test_a_stopped_redis_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Five threads fail repeatedly."""
    server = start_redis(tmp_path, free_port())
    metrics = new_metrics()
    run = work(server.url, metrics)
    try:
        with redis.Redis.from_url(server.url) as client:
            until(lambda: TaskStore(client).workers(), "it works")
            server.process.send_signal(signal.SIGSTOP)
            until(lambda: metrics.value("redis_errors_total") >= 8, "calls fail")
            server.process.send_signal(signal.SIGCONT)
            task = submit(client, prompt_token_ids=(1,))
            assert tokens_of(ended(client, task)) == expected_tokens([1], 5)
    finally:
        server.process.send_signal(signal.SIGCONT)
        end(run)
        server.process.kill()
        server.process.wait()
    warned = [
        one for one in caplog.records if one.levelno >= logging.WARNING and "Redis fails" in one.message
    ]
    assert len(warned) == 1
