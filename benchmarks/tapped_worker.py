"""A worker's loop, publisher and leases, put together for a measurement with a tap between the first two.

Law: whatever disturbs the measurement raises. The parts are those of a real worker, on a real Redis; only
the claiming of more tasks is left out, as all run from the start.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from prometheus_client import CollectorRegistry

from engine.engine import Engine, QueuePosition
from engine.execution.build import Execution
from engine.outputs import StepOutput
from engine.requests.engine_request import EngineRequest
from engine.sampling_params import SamplingParams
from monitoring.worker import WorkerMetrics
from tokenmill.protocol import naming
from tokenmill.protocol.messages import TaskError
from tokenmill.protocol.records import Submission
from tokenmill.protocol.store.task_store import TaskStore
from tokenmill.settings.processes import Timing
from worker.connections import connect
from worker.inbox import Inbox, PreparedTask
from worker.leases import Leases
from worker.loop import Loop
from worker.ownership import OwnedTasks, Ownership
from worker.publisher import Publisher
from worker.service import Service
from worker.stream import Stream
from worker.watchdog import Observers, Watchdog

SLUG = "benchmark"
TIMING = Timing()
DRAIN_SECONDS = 0.001


class Tap:
    """The loop's sink: hands on to the publisher at once, or, while `is_shut`, keeps what it is given."""

    def __init__(self, publisher: Publisher) -> None:
        self.is_shut = False
        self._publisher = publisher
        self._kept: list[StepOutput] = []

    @property
    def is_full(self) -> bool:
        return self._publisher.is_full

    def hand(self, output: StepOutput) -> None:
        if self.is_shut:
            self._kept.append(output)
        else:
            self._publisher.hand(output)

    def open(self) -> None:
        """Hand on all that was kept, and from now on at once."""
        self.is_shut = False
        kept, self._kept = self._kept, []
        for output in kept:
            self._publisher.hand(output)

    def tell_waiting(self, line: list[QueuePosition]) -> None:
        self._publisher.tell_waiting(line)

    def fail(self, request_id: str, error: TaskError) -> None:
        raise AssertionError(f"{request_id}: {error.message}")

    def wait_for_room(self, seconds: float) -> None:
        self._publisher.wait_for_room(seconds)


class TappedWorker:
    """Has claimed `num_tasks`, of prompts of `prompt_tokens` and outputs of `max_tokens`, none of them begun.

    `storing_seconds`: of the processor, that the publisher's thread took.
    """

    def __init__(
        self, execution: Execution, url: str, *, num_tasks: int, prompt_tokens: int, max_tokens: int
    ) -> None:
        self.storing_seconds = 0.0
        self._owned_tasks = OwnedTasks(threading.Event())
        self._metrics = WorkerMetrics(CollectorRegistry(), model=SLUG)
        self._watchdog = Watchdog(1e6, time.monotonic, on_tick=lambda: None, arm=lambda _: None)
        self._inbox = Inbox()
        store = TaskStore(connect(url, "publisher"))
        self._publisher = Publisher(
            store, self._owned_tasks, self._metrics, on_lost=_disturbed, on_cancelled=_disturbed
        )
        self.tap = Tap(self._publisher)
        self._claim(store, num_tasks, _prompts(execution.vocab_size, prompt_tokens), max_tokens)
        self.loop = Loop(
            _engine(execution),
            self._inbox,
            self.tap,
            self._owned_tasks,
            observers=Observers((), lambda: None),
            watchdog=self._watchdog,
            clock=time.monotonic,
            wake=threading.Event(),
        )
        leases = self._leases(TaskStore(connect(url, "leases")))
        self._services = [_service("publisher", self._publish), _service("leases", leases.turn)]

    def start(self) -> None:
        for service in self._services:
            service.start()

    def stop(self) -> None:
        for service in self._services:
            service.stop()
            service.join(10)

    def drain(self) -> None:
        """Until all that was handed to the publisher is stored."""
        while not self._publisher.is_drained or self._publisher.backlog:
            time.sleep(DRAIN_SECONDS)

    def _publish(self) -> None:
        began = time.thread_time()
        self._publisher.turn()
        self.storing_seconds += time.thread_time() - began

    def _claim(
        self, store: TaskStore, num_tasks: int, prompt: Callable[[int], list[int]], max_tokens: int
    ) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        for _ in range(num_tasks):
            store.submit(_submission())
        claimed = store.claim(SLUG, worker=SLUG, max_tasks=num_tasks, lease_seconds=TIMING.lease_seconds)
        for number, task in enumerate(claimed):
            ownership = Ownership(task.task_id, task.owner)
            self._owned_tasks.take(ownership)
            self._publisher.open(Stream(ownership, num_prompt_tokens=len(prompt(number))))
            self._inbox.put(
                PreparedTask(
                    ownership,
                    EngineRequest(
                        ownership.request_id, prompt(number), params, arrival_time=task.accepted_at
                    ),
                )
            )

    def _leases(self, store: TaskStore) -> Leases:
        return Leases(
            store,
            self._owned_tasks,
            self._watchdog,
            self._metrics,
            slug=SLUG,
            lease_seconds=TIMING.lease_seconds,
            max_task_seconds=TIMING.max_task_seconds,
            announce=lambda: None,
            on_lost=_disturbed,
            on_cancelled=_disturbed,
            clock=time.monotonic,
            wait=time.sleep,
        )


def _disturbed(*what: object) -> None:
    raise AssertionError(f"the measurement was disturbed: {what}")


def _service(name: str, turn: Callable[[], None]) -> Service:
    return Service(name, turn, on_redis_error=_disturbed, on_failure=_disturbed)


def _prompts(vocab_size: int, length: int) -> Callable[[int], list[int]]:
    """By number; all different, and without the lowest ids, which are special ones."""
    return lambda number: [5 + (number * length + at) * 37 % (vocab_size - 5) for at in range(length)]


def _engine(execution: Execution) -> Engine:
    # Nobody ends before the measurement does.
    return replace(execution, eos_token_ids=frozenset()).new_engine()


def _submission() -> Submission:
    queue = naming.queue_name(SLUG, naming.DEFAULT_PRIORITY, naming.DEFAULT_TENANT)
    return Submission(
        task_id=naming.new_task_id(),
        queue=queue,
        slug=SLUG,
        model=SLUG,
        priority=naming.DEFAULT_PRIORITY,
        tenant=naming.DEFAULT_TENANT,
        job_fields={"status": "queued", "data": b"", "origin": queue},
        cost=1,
    )
