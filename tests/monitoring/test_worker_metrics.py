"""The worker's metrics, one by one."""

import time

import pytest
from prometheus_client import CollectorRegistry

from monitoring.worker import WorkerMetrics


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> WorkerMetrics:
    return WorkerMetrics(registry, model="tiny")


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"tokenmill_{name}", {"model": "tiny", **labels})


@pytest.mark.parametrize(
    ("verb", "name"),
    [
        ("claimed", "tasks_claimed_total"),
        ("lost", "tasks_lost_total"),
        ("handed_back", "tasks_handed_back_total"),
        ("reclaimed", "tasks_reclaimed_total"),
        ("suspected", "tasks_suspected_total"),
        ("poisoned", "tasks_poisoned_total"),
        ("published", "messages_published_total"),
    ],
)
def test_counts_add_up_from_zero(
    registry: CollectorRegistry, metrics: WorkerMetrics, verb: str, name: str
) -> None:
    assert value(registry, name) == 0
    getattr(metrics, verb)(3)
    getattr(metrics, verb)(0)
    getattr(metrics, verb)(2)
    assert value(registry, name) == 5


def test_a_backlog_goes_up_and_down(registry: CollectorRegistry, metrics: WorkerMetrics) -> None:
    metrics.publish_backlog(7)
    metrics.publish_backlog(2)
    assert value(registry, "publish_backlog_messages") == 2


def test_redis_errors_are_counted_by_part(registry: CollectorRegistry, metrics: WorkerMetrics) -> None:
    assert value(registry, "redis_errors_total", op="intake") == 0
    metrics.redis_error("intake")
    metrics.redis_error("intake")
    metrics.redis_error("a new part")
    assert value(registry, "redis_errors_total", op="intake") == 2
    assert value(registry, "redis_errors_total", op="a new part") == 1


def test_a_tick_is_a_unix_timestamp(registry: CollectorRegistry, metrics: WorkerMetrics) -> None:
    assert value(registry, "worker_last_tick_timestamp_seconds") == 0
    before = time.time()
    metrics.tick()
    tick = value(registry, "worker_last_tick_timestamp_seconds")
    assert tick is not None
    assert before <= tick <= time.time()


def test_loading_time_and_observer_errors(registry: CollectorRegistry, metrics: WorkerMetrics) -> None:
    metrics.model_load_seconds(3.5)
    metrics.observer_error()
    assert value(registry, "model_load_seconds") == 3.5
    assert value(registry, "observer_errors_total") == 1
