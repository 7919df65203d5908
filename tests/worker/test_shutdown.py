"""The shutdown of a worker is bounded, whatever stalls."""

import threading

import redis

from tests.worker.fakes import FakeRunner, build_engine, submit, until, wait_for_length
from tests.worker.running import running
from tokenmill.serve import service as serve
from tokenmill.settings.declarations import Timing
from worker import batch_worker


def test_the_phases_fit_the_deadline_and_the_deadline_fits_the_supervisors() -> None:
    parts = (
        batch_worker.LAST_STEP_SECONDS
        + batch_worker.FLUSH_SECONDS
        + batch_worker.HAND_BACK_SECONDS
        + batch_worker.SIGN_OFF_SECONDS
    )

    assert parts < batch_worker.SHUTDOWN_SECONDS < serve.EXTRA_STOP_SECONDS


def test_the_deadline_is_set_before_any_wait(redis_url: str, redis_client: "redis.Redis") -> None:
    """docling-jobkit#102: a step that never returned kept its worker alive."""
    armed: list[float] = []
    runner, permits = FakeRunner(), threading.Semaphore(1)
    runner.before_step = permits.acquire
    task = submit(redis_client, sampling={"max_tokens": 50})

    with running(redis_url, build_engine(runner), timing=Timing(grace_seconds=0.0), arm=armed.append) as run:
        wait_for_length(redis_client, task, 1)
        run.worker.stop("a test")
        until(lambda: batch_worker.SHUTDOWN_SECONDS in armed, "the deadline is set during the step")
        assert run.status is None
        permits.release(100)
        assert run.wait() == 0

    assert armed[-1] == batch_worker.SHUTDOWN_SECONDS, "no tick has postponed it"
