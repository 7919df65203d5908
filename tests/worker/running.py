"""A BatchWorker in this process, for tests: real threads, no signal handlers."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engine.engine import Engine
from tests.worker.fakes import TIMEOUT_SECONDS, build_engine, new_metrics, served_model
from tokenmill.settings.declarations import Timing
from worker.batch_worker import BatchWorker
from worker.connections import connect
from worker.context import WorkerContext

TIMING = Timing(lease_seconds=2.0, grace_seconds=10.0)


class Running:
    """A worker that works in a thread. `context` holds what its threads share."""

    def __init__(self, worker: BatchWorker) -> None:
        self.worker = worker
        self.context = worker.context
        self.status: int | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        self.status = self.worker.work()

    def wait(self) -> int | None:
        """Wait for its end. Returns its exit status."""
        self._thread.join(TIMEOUT_SECONDS)
        assert not self._thread.is_alive()
        return self.status


def make_worker(url: str, engine: Engine | None = None, **fields: Any) -> BatchWorker:
    """`fields`: of WorkerContext, in place of those for a test."""
    defaults: dict[str, Any] = {
        "model": served_model(),
        "connect": lambda name: connect(url, name),
        "metrics": new_metrics(),
        "timing": TIMING,
        "arm": lambda _: None,
    }
    return BatchWorker(engine or build_engine(), WorkerContext(**(defaults | fields)))


@contextmanager
def running(url: str, engine: Engine | None = None, **fields: Any) -> Iterator[Running]:
    """A worker that is stopped at the end of the context."""
    run = Running(make_worker(url, engine, **fields))
    try:
        yield run
    finally:
        run.worker.stop("the test's end")
        run.worker.stop("the test's end")
        run.wait()
