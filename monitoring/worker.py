"""Metrics of a worker: its tasks, its calls to Redis, and the liveness of its loop."""

from prometheus_client import CollectorRegistry, Counter

from monitoring.families import PREFIX, Families
from monitoring.reaper import ReapFailures

OPS = ("loading", "intake", "publisher", "leases", "listener", "shutdown")
"""The parts of a worker that call Redis."""


class WorkerMetrics:
    """The worker's metrics in `docs/metrics.md`. Thread-safe."""

    def __init__(self, registry: CollectorRegistry, *, model: str) -> None:
        self._model = model
        self._redis_errors = Counter(
            f"{PREFIX}redis_errors_total",
            "Calls to Redis that failed, by the part of the worker that made them.",
            ("model", "op"),
            registry=registry,
        )
        for op in OPS:
            self._redis_errors.labels(model=model, op=op)
        self._reap_failures = ReapFailures(registry)
        families = Families(registry, model=model)
        self._init_tasks(families)
        self._init_streams(families)
        self._init_loop(families)

    def _init_tasks(self, families: Families) -> None:
        self._claimed = families.counter("tasks_claimed_total", "Tasks that this worker claimed.")
        self._lost = families.counter(
            "tasks_lost_total", "Tasks that this worker claimed and lost, because their leases lapsed."
        )
        self._handed_back = families.counter(
            "tasks_handed_back_total", "Unfinished tasks that this worker returned to the front of the queue."
        )
        self._reclaimed = families.counter(
            "tasks_reclaimed_total",
            "Tasks with a lapsed lease that this worker returned to the queue.",
        )
        self._suspected = families.counter(
            "tasks_suspected_total",
            "Tasks that this worker ran alone at first, because an earlier worker may have died of them.",
        )
        self._poisoned = families.counter(
            "tasks_poisoned_total",
            "Tasks that this worker ended, because several workers died while running them alone.",
        )

    def _init_streams(self, families: Families) -> None:
        self._published = families.counter("messages_published_total", "Messages written to token streams.")
        self._backlog = families.gauge(
            "publish_backlog_messages", "Messages that are not written to token streams yet."
        )

    def _init_loop(self, families: Families) -> None:
        self._tick = families.gauge(
            "worker_last_tick_timestamp_seconds",
            "Time of the last turn of the worker's loop (seconds since 1970).",
        )
        self._load = families.gauge("model_load_seconds", "Time that it took to load the model.")
        self._dropped_steps = families.counter(
            "step_reports_dropped_total", "Reports of steps that were not written to Redis. No token is lost."
        )
        self._observer_errors = families.counter(
            "observer_errors_total", "Exceptions in observers of the loop. The loop continues."
        )

    def redis_error(self, op: str) -> None:
        """A call to Redis failed. `op`: one of `OPS`."""
        self._redis_errors.labels(model=self._model, op=op).inc()

    def claimed(self, tasks: int) -> None:
        self._claimed.inc(tasks)

    def lost(self, tasks: int) -> None:
        self._lost.inc(tasks)

    def handed_back(self, tasks: int) -> None:
        self._handed_back.inc(tasks)

    def reclaimed(self, tasks: int) -> None:
        self._reclaimed.inc(tasks)

    def suspected(self, tasks: int) -> None:
        self._suspected.inc(tasks)

    def poisoned(self, tasks: int) -> None:
        self._poisoned.inc(tasks)

    def reap_failure(self, duty: str) -> None:
        """A duty of the reaper could not process a record."""
        self._reap_failures.failed(duty)

    def published(self, messages: int) -> None:
        self._published.inc(messages)

    def publish_backlog(self, messages: int) -> None:
        """Set the number of messages that are not written."""
        self._backlog.set(messages)

    def tick(self) -> None:
        """The loop took a turn: it stepped, is idle, or waits for Redis."""
        self._tick.set_to_current_time()

    def model_load_seconds(self, seconds: float) -> None:
        self._load.set(seconds)

    def dropped_steps(self, reports: int) -> None:
        self._dropped_steps.inc(reports)

    def observer_error(self) -> None:
        self._observer_errors.inc()
