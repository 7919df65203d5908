"""What a worker counts of its dealings with Redis, and its sign of life. Knows no Redis and no engine."""

from prometheus_client import CollectorRegistry, Counter

from monitoring.families import PREFIX, Families
from monitoring.reaper import ReapFailures

OPS = ("loading", "intake", "publisher", "leases", "listener", "shutdown")
"""The parts of a worker that call Redis."""


class WorkerMetrics:
    """The worker's side of the table in `docs/metrics.md`. Every verb may be called from any thread."""

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
        self._claimed = families.counter("tasks_claimed_total", "Tasks that this worker took from the queue.")
        self._lost = families.counter(
            "tasks_lost_total", "Tasks that this worker had claimed and that another has now, or nobody."
        )
        self._handed_back = families.counter(
            "tasks_handed_back_total", "Tasks that this worker put back to the front of the queue unfinished."
        )
        self._reclaimed = families.counter(
            "tasks_reclaimed_total",
            "Tasks whose lease had lapsed and that this worker put back in the queue.",
        )
        self._suspected = families.counter(
            "tasks_suspected_total",
            "Tasks that this worker ran alone for a while, as an earlier worker may have died of them.",
        )
        self._poisoned = families.counter(
            "tasks_poisoned_total",
            "Tasks that this worker ended, as several workers had died while they ran them alone.",
        )

    def _init_streams(self, families: Families) -> None:
        self._published = families.counter("messages_published_total", "Messages written to token streams.")
        self._backlog = families.gauge(
            "publish_backlog_messages", "Messages that wait to be written to token streams."
        )

    def _init_loop(self, families: Families) -> None:
        self._tick = families.gauge(
            "worker_last_tick_timestamp_seconds",
            "When the worker's loop last went round (seconds since 1970).",
        )
        self._load = families.gauge("model_load_seconds", "Time that loading the model took.")
        self._observer_errors = families.counter(
            "observer_errors_total", "Exceptions in observers of the loop, which went on."
        )

    def redis_error(self, op: str) -> None:
        """A call failed. `op`: who made it, in the worker's own words, never text that came from outside."""
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
        """A record could not be treated by a duty of the reaper."""
        self._reap_failures.failed(duty)

    def published(self, messages: int) -> None:
        self._published.inc(messages)

    def publish_backlog(self, messages: int) -> None:
        """How many wait now."""
        self._backlog.set(messages)

    def tick(self) -> None:
        """The loop went round: it stepped, is idle, or waits for Redis."""
        self._tick.set_to_current_time()

    def model_load_seconds(self, seconds: float) -> None:
        self._load.set(seconds)

    def observer_error(self) -> None:
        self._observer_errors.inc()
