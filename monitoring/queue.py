"""Metrics of the queue in Redis, read at each scrape.

Invariant: a scrape reads Redis once. If Redis is away the scrape still succeeds: `redis_up` is 0, and the
metrics that need Redis are missing.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, get_args

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from redis import RedisError

from monitoring.families import PREFIX
from tokenmill.protocol.naming import PRIORITIES
from tokenmill.protocol.records import WorkerRecord, WorkerState
from tokenmill.protocol.snapshots import QueueStats

REASONS = ("stop", "length", "cancelled", "timeout", "error")
"""Finish reasons of a task."""
OTHER_STATE = "other"
"""Label for states that this version does not know, since a worker may be newer."""


class QueueReader(Protocol):
    """The part of the task store that is used here."""

    def queue_stats(self, slug: str) -> QueueStats: ...
    def workers(self) -> list[WorkerRecord]: ...


class QueueCollector(Collector):
    """The queue of one model and its workers. Registered in one process of a deployment, the API.

    `slug`: the model's name in Redis keys. `model`: its public name, used as the label.
    """

    def __init__(self, store: QueueReader, slug: str, model: str) -> None:
        self._store = store
        self._slug = slug
        self._model = model

    def describe(self) -> Iterator[Metric]:
        """The families without values, so that registering does not read Redis."""
        yield _redis_up(0)
        stats = QueueStats(
            waiting={},
            oldest_age=0,
            waiting_cost=0,
            claimed=0,
            drain_rate=None,
            num_ready_workers=0,
            totals={},
        )
        yield from self._families(stats, [])

    def collect(self) -> Iterator[Metric]:
        try:
            stats = self._store.queue_stats(self._slug)
            workers = self._store.workers()
        except RedisError:
            yield _redis_up(0)
            return
        yield _redis_up(1)
        yield from self._families(stats, workers)

    def _families(self, stats: QueueStats, workers: Iterable[WorkerRecord]) -> Iterator[Metric]:
        yield self._gauges(
            "queue_tasks",
            "Tasks that wait in Redis, by priority class (0 is served first).",
            "priority",
            {str(priority): stats.waiting.get(priority, 0) for priority in PRIORITIES},
        )
        yield self._gauge(
            "queue_oldest_age_seconds", "Time since the oldest waiting task was accepted.", stats.oldest_age
        )
        yield self._gauge(
            "queue_waiting_tokens",
            "Estimated tokens of the waiting tasks, prompts and outputs.",
            stats.waiting_cost,
        )
        yield self._gauge("tasks_owned", "Tasks that workers have claimed and not ended.", stats.claimed)
        yield self._gauges(
            "workers", "Worker processes, by the state that they report.", "state", self._states(workers)
        )
        yield from self._totals(stats.totals)
        yield _webhooks({"due": stats.webhooks_due, "later": stats.webhooks_later})

    def _totals(self, totals: Mapping[str, int]) -> Iterator[Metric]:
        """Counters of the whole deployment. They are kept in Redis and survive restarts."""
        yield self._counter("tasks_submitted_total", "Tasks that were accepted.", totals.get("submitted", 0))
        finished = CounterMetricFamily(
            f"{PREFIX}tasks_finished_total",
            "Tasks that ended, by finish reason.",
            labels=("model", "reason"),
        )
        for reason in REASONS:
            finished.add_metric((self._model, reason), totals.get(f"finished:{reason}", 0))
        yield finished
        yield self._counter(
            "tasks_client_errors_total",
            "Of the tasks that ended with an error, those whose client has to correct the request.",
            totals.get("client_errors", 0),
        )
        yield self._counter(
            "tasks_prompt_tokens_total",
            "Prompt tokens of the tasks that ended.",
            totals.get("prompt_tokens", 0),
        )
        yield self._counter(
            "tasks_completion_tokens_total",
            "Output tokens of the tasks that ended.",
            totals.get("completion_tokens", 0),
        )

    def _states(self, workers: Iterable[WorkerRecord]) -> dict[str, int]:
        counts = dict.fromkeys((*get_args(WorkerState), OTHER_STATE), 0)
        for worker in workers:
            if worker.slug == self._slug:
                counts[worker.state if worker.state in counts else OTHER_STATE] += 1
        return counts

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(PREFIX + name, text, labels=("model",))
        family.add_metric((self._model,), value)
        return family

    def _gauges(self, name: str, text: str, label: str, values: Mapping[str, int]) -> GaugeMetricFamily:
        family = GaugeMetricFamily(PREFIX + name, text, labels=("model", label))
        for value, number in values.items():
            family.add_metric((self._model, value), number)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(PREFIX + name, text, labels=("model",))
        family.add_metric((self._model,), value)
        return family


def _webhooks(counts: Mapping[str, int]) -> GaugeMetricFamily:
    text = "Webhooks that are not delivered yet: due now, or due later for another attempt."
    family = GaugeMetricFamily(f"{PREFIX}webhooks_undelivered", text, labels=("state",))
    for state, number in counts.items():
        family.add_metric((state,), number)
    return family


def _redis_up(value: int) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}redis_up", "Whether Redis answered this scrape.", value=value)
