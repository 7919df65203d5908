"""A worker's loop, publisher and leases on a real Redis, with a tap between loop and publisher.

No more tasks are claimed, since all run from the start. Everything that would disturb the measurement raises.
"""

import time
from collections.abc import Callable
from dataclasses import replace

from prometheus_client import CollectorRegistry

from engine.engine import Engine, RequestPosition
from engine.execution.build import Execution
from engine.outputs import StepOutput
from engine.requests.engine_request import EngineRequest
from engine.sampling_params import SamplingParams
from monitoring.worker import WorkerMetrics
from tokenmill.protocol import naming
from tokenmill.protocol.messages import TaskError
from tokenmill.protocol.records import Submission
from tokenmill.protocol.store.task_store import TaskStore
from worker.connections import connect
from worker.context import WorkerContext
from worker.inbox import PreparedTask
from worker.leases import Leases
from worker.loop import Loop
from worker.output_queue import OutputQueue
from worker.ownership import Ownership
from worker.preparation import ServedModel
from worker.publisher import Publisher
from worker.service import Service
from worker.stream import Stream
from worker.watchdog import Observers

SLUG = "benchmark"
DRAIN_POLL_SECONDS = 0.001
MAX_DRAIN_SECONDS = 60.0


class Tap:
    """The loop's sink: passes outputs to the publisher at once or, while `is_shut`, keeps them."""

    def __init__(self, outputs: OutputQueue) -> None:
        self.is_shut = False
        self._outputs = outputs
        self._kept: list[StepOutput] = []

    @property
    def is_full(self) -> bool:
        return self._outputs.is_full

    def put(self, output: StepOutput) -> None:
        if self.is_shut:
            self._kept.append(output)
        else:
            self._outputs.put(output)

    def open(self) -> None:
        """Pass on what was kept, and later outputs at once."""
        self.is_shut = False
        kept, self._kept = self._kept, []
        for output in kept:
            self._outputs.put(output)

    def put_positions(self, positions: list[RequestPosition]) -> None:
        self._outputs.put_positions(positions)

    def fail(self, request_id: str, error: TaskError) -> None:
        raise AssertionError(f"{request_id}: {error.message}")

    def wait_for_room(self, seconds: float) -> None:
        self._outputs.wait_for_room(seconds)


class TappedWorker:
    """Has claimed `num_tasks` with `prompt_tokens` each, to generate `max_tokens` each. None has started.

    `storing_seconds`: CPU time of the publisher's thread.
    """

    def __init__(
        self, execution: Execution, url: str, *, num_tasks: int, prompt_tokens: int, max_tokens: int
    ) -> None:
        self.storing_seconds = 0.0
        self._context = _UndisturbedContext(execution, url)
        store = self._context.new_store(self._context.connect("publisher"))
        self._publisher = Publisher(store, self._context)
        self.tap = Tap(self._context.outputs)
        self._claim(store, num_tasks, _prompts(execution.vocab_size, prompt_tokens), max_tokens)
        self.loop = Loop(
            _engine(execution),
            self._context.inbox,
            self.tap,
            self._context.owned_tasks,
            observers=Observers((), self._context.metrics),
            watchdog=self._context.watchdog,
            clock=time.monotonic,
            wake=self._context.wake,
        )
        leases = Leases(self._context.new_store(self._context.connect("leases")), self._context, _Silent())
        self._services = [
            Service("publisher", self._publish, self._context),
            Service("leases", leases.turn, self._context),
        ]

    def start(self) -> None:
        for service in self._services:
            service.start()

    def stop(self) -> None:
        for service in self._services:
            service.stop()
            service.join(10)

    def drain(self) -> None:
        """Wait until the publisher has stored every output."""
        deadline = time.monotonic() + MAX_DRAIN_SECONDS
        while not self._publisher.is_drained or self._context.outputs.backlog:
            assert time.monotonic() < deadline, "the publisher stores nothing"
            time.sleep(DRAIN_POLL_SECONDS)

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
        claimed = store.claim(
            SLUG, worker=SLUG, max_tasks=num_tasks, lease_seconds=self._context.timing.lease_seconds
        )
        for number, task in enumerate(claimed):
            ownership = Ownership(task.task_id, task.owner)
            self._context.owned_tasks.add(ownership)
            self._context.outputs.open(Stream(ownership, num_prompt_tokens=len(prompt(number))))
            self._context.inbox.put(
                PreparedTask(
                    ownership,
                    EngineRequest(
                        ownership.request_id, prompt(number), params, arrival_time=task.accepted_at
                    ),
                )
            )


class _UndisturbedContext(WorkerContext):
    """A context in which every drop and every failed thread raises. The process is never ended."""

    def __init__(self, execution: Execution, url: str) -> None:
        super().__init__(
            model=ServedModel(name=SLUG, slug=SLUG, fingerprint="", tokenizer=execution.tokenizer),
            connect=lambda name: connect(url, name),
            metrics=_UndisturbedMetrics(CollectorRegistry(), model=SLUG),
            arm=lambda _: None,
        )

    def drop_lost(self, ownership: Ownership) -> None:
        raise AssertionError(f"the measurement was disturbed: {ownership} was lost")

    def drop_cancelled(self, ownership: Ownership) -> None:
        raise AssertionError(f"the measurement was disturbed: {ownership} was cancelled")

    def thread_failed(self, thread: str, error: BaseException) -> None:
        raise AssertionError(f"the measurement was disturbed: thread {thread} failed") from error


class _UndisturbedMetrics(WorkerMetrics):
    def redis_error(self, op: str) -> None:
        raise AssertionError(f"the measurement was disturbed: Redis failed in thread {op}")


class _Silent:
    """Announces nothing."""

    def announce(self) -> None:
        pass


def _prompts(vocab_size: int, length: int) -> Callable[[int], list[int]]:
    """Different prompts by number, without the lowest ids, which are special tokens."""
    return lambda number: [5 + (number * length + at) * 37 % (vocab_size - 5) for at in range(length)]


def _engine(execution: Execution) -> Engine:
    # No request ends before the measurement.
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
