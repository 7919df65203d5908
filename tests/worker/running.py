"""A BatchWorker in this process, for tests: its threads are real, the signal handlers stay out."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from engine.engine import Engine
from tests.worker.workshop import WATCHDOG_SECONDS, build_engine, new_metrics, served_model
from tokenmill.settings.processes import Timing
from worker.batch_worker import BatchWorker
from worker.connections import connect
from worker.preparation import ServedModel
from worker.threads import WorkerContext

TIMING = Timing(lease_seconds=2.0, grace_seconds=10.0)


class Running:
    """`worker` at work in a thread of its own."""

    def __init__(self, worker: BatchWorker) -> None:
        self.worker = worker
        self.status: int | None = None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        self.status = self.worker.work()

    def wait(self) -> int | None:
        """Until it has ended; gives its exit status."""
        self._thread.join(WATCHDOG_SECONDS)
        assert not self._thread.is_alive()
        return self.status


def make_worker(
    url: str,
    engine: Engine | None = None,
    *,
    model: ServedModel | None = None,
    timing: Timing = TIMING,
    connecting: Callable[[str], Any] | None = None,
    observers: Any = (),
    arm: Callable[[float], None] = lambda _: None,
) -> BatchWorker:
    given = WorkerContext(
        connect=connecting or (lambda name: connect(url, name)),
        metrics=new_metrics(),
        timing=timing,
        observers=observers,
        clock=time.monotonic,
        arm=arm,
    )
    return BatchWorker(engine or build_engine(), model or served_model(), given)


@contextmanager
def running(url: str, engine: Engine | None = None, **options: Any) -> Iterator[Running]:
    """A worker that is stopped at the end, if it has not been before."""
    run = Running(make_worker(url, engine, **options))
    try:
        yield run
    finally:
        run.worker.stop("the test's end")
        run.worker.stop("the test's end")
        run.wait()
