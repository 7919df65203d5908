"""The end of a worker: bounded from its first moment on, whatever hangs."""

import threading

import redis

from tests.worker.running import running
from tests.worker.workshop import FakeRunner, build_engine, submit, until, wait_for_length
from tokenmill.serve import service as serve
from tokenmill.settings.processes import Timing
from worker import batch_worker


def test_the_parts_fit_into_the_whole_and_the_whole_into_the_supervisors_patience() -> None:
    parts = (
        batch_worker.LAST_STEP_SECONDS
        + batch_worker.FLUSH_SECONDS
        + batch_worker.HAND_BACK_SECONDS
        + batch_worker.SIGN_OFF_SECONDS
    )

    assert parts < batch_worker.SHUTDOWN_SECONDS < serve.EXTRA_STOP_SECONDS


def test_the_hard_end_is_set_before_anything_is_waited_for(
    redis_url: str, redis_client: "redis.Redis"
) -> None:
    """docling-jobkit#102: a hanging step kept its worker, and nobody ended that."""
    armed: list[float] = []
    runner, permits = FakeRunner(), threading.Semaphore(1)
    runner.before_step = permits.acquire
    task = submit(redis_client, sampling={"max_tokens": 50})

    with running(redis_url, build_engine(runner), timing=Timing(grace_seconds=0.0), arm=armed.append) as run:
        wait_for_length(redis_client, task, 1)
        run.worker.stop("a test")
        until(lambda: batch_worker.SHUTDOWN_SECONDS in armed, "the hard end is set while the step hangs")
        assert run.status is None
        permits.release(100)
        assert run.wait() == 0

    assert armed[-1] == batch_worker.SHUTDOWN_SECONDS, "no tick has put it off"
