"""The metrics that the service exports: the registry of the API, and that of a worker."""

from collections.abc import Iterable, Iterator
from typing import Any

import promql_parser
from prometheus_client import CollectorRegistry, Metric

from monitoring.engine import EngineMetrics
from monitoring.http import HttpMetrics
from monitoring.queue import QueueCollector
from monitoring.reaper import ReapFailures
from monitoring.redis_state import RedisStateMetrics
from monitoring.webhooks import WebhookMetrics
from monitoring.worker import WorkerMetrics
from tokenmill.protocol.records import WorkerRecord
from tokenmill.protocol.snapshots import QueueStats

MODEL = "tiny"
SLUG = "tiny-abc123"


class EmptyQueue:
    """A store without tasks and workers."""

    def queue_stats(self, slug: str) -> QueueStats:
        return QueueStats(
            waiting={},
            oldest_age=0,
            waiting_cost=0,
            claimed=0,
            drain_rate=None,
            num_ready_workers=0,
            totals={},
        )

    def workers(self) -> list[WorkerRecord]:
        return []


def api_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    HttpMetrics(registry)
    WebhookMetrics(registry)
    ReapFailures(registry, by_api=True)
    RedisStateMetrics(registry)
    registry.register(QueueCollector(EmptyQueue(), SLUG, MODEL))
    return registry


def worker_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    EngineMetrics(registry, model=MODEL, max_model_len=2048)
    WorkerMetrics(registry, model=MODEL)
    return registry


def families() -> list[Metric]:
    """The families of the whole service."""
    return [*api_registry().collect(), *worker_registry().collect()]


def series_names(metrics: Iterable[Metric]) -> set[str]:
    """The names that a query can use."""
    names: set[str] = set()
    for metric in metrics:
        if metric.type == "counter":
            names.add(f"{metric.name}_total")
        elif metric.type == "histogram":
            names |= {f"{metric.name}_{suffix}" for suffix in ("bucket", "sum", "count")}
        else:
            names.add(metric.name)
    return names


def shared_names() -> set[str]:
    """The names that every API process exports with the same values, since they describe the deployment."""
    return series_names(QueueCollector(EmptyQueue(), SLUG, MODEL).collect())


def summed_names(expression: str) -> set[str]:
    """The names whose values a PromQL expression adds up over processes."""
    return set(_summed(promql_parser.parse(expression), inside_sum=False))


def _summed(node: Any, *, inside_sum: bool) -> Iterator[str]:
    if isinstance(node, promql_parser.VectorSelector):
        if inside_sum and node.name:
            yield node.name
        return
    if isinstance(node, promql_parser.AggregateExpr):
        inside_sum = str(node.op) not in {"max", "min"}
    for name in ("lhs", "rhs", "expr", "vector_selector"):
        if (child := getattr(node, name, None)) is not None:
            yield from _summed(child, inside_sum=inside_sum)
    for child in getattr(node, "args", ()):
        yield from _summed(child, inside_sum=inside_sum)


def metric_names(expression: str) -> set[str]:
    """The names that a PromQL expression reads. Raises ValueError for invalid PromQL."""
    names: set[str] = set()

    def collect(node: object) -> None:
        if isinstance(node, promql_parser.VectorSelector) and node.name:
            names.add(node.name)

    promql_parser.walk(promql_parser.parse(expression), collect)
    return names
