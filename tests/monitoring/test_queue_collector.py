"""The queue's metrics: one read of Redis for each scrape, and a metric if Redis is away."""

from dataclasses import replace

import pytest
import redis
from prometheus_client import CollectorRegistry
from redis.backoff import NoBackoff
from redis.retry import Retry

from monitoring.http import expose
from monitoring.queue import QueueCollector
from tests.monitoring.exported import MODEL, SLUG
from tokenmill.protocol.records import WorkerRecord, WorkerState
from tokenmill.protocol.snapshots import QueueStats
from tokenmill.protocol.store.task_store import TaskStore

STATS = QueueStats(
    waiting={0: 1, 1: 0, 2: 7, 3: 0, 4: 2},
    oldest_age=12.5,
    waiting_cost=4096,
    claimed=5,
    drain_rate=100.0,
    num_ready_workers=1,
    webhooks_due=3,
    webhooks_later=4,
    totals={
        "submitted": 40,
        "finished:stop": 20,
        "finished:error": 3,
        "client_errors": 2,
        "prompt_tokens": 900,
        "completion_tokens": 700,
    },
)


def worker(name: str, state: WorkerState, slug: str = SLUG) -> WorkerRecord:
    return WorkerRecord(name=name, model=MODEL, slug=slug, state=state, started_at=0.0)


class CountingStore:
    """Returns `stats` and `records`, counts the reads, and raises `error` if it is set."""

    def __init__(self, stats: QueueStats = STATS) -> None:
        self.stats = stats
        self.records: list[WorkerRecord] = []
        self.error: Exception | None = None
        self.num_reads = 0

    def queue_stats(self, slug: str) -> QueueStats:
        assert slug == SLUG
        self.num_reads += 1
        if self.error:
            raise self.error
        return self.stats

    def workers(self) -> list[WorkerRecord]:
        return self.records


@pytest.fixture
def store() -> CountingStore:
    return CountingStore()


@pytest.fixture
def registry(store: CountingStore) -> CollectorRegistry:
    registry = CollectorRegistry()
    registry.register(QueueCollector(store, SLUG, MODEL))
    return registry


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"tokenmill_{name}", {"model": MODEL, **labels})


def test_every_value_of_the_queue_is_exported(registry: CollectorRegistry) -> None:
    exported = {
        "waiting": [value(registry, "queue_tasks", priority=str(priority)) for priority in range(5)],
        "oldest": value(registry, "queue_oldest_age_seconds"),
        "tokens": value(registry, "queue_waiting_tokens"),
        "owned": value(registry, "tasks_owned"),
        "submitted": value(registry, "tasks_submitted_total"),
        "client_errors": value(registry, "tasks_client_errors_total"),
        "prompt": value(registry, "tasks_prompt_tokens_total"),
        "completion": value(registry, "tasks_completion_tokens_total"),
        "webhooks": [
            registry.get_sample_value("tokenmill_webhooks_undelivered", {"state": state})
            for state in ("due", "later")
        ],
        "up": registry.get_sample_value("tokenmill_redis_up"),
    }
    assert exported == {
        "waiting": [1, 0, 7, 0, 2],
        "oldest": 12.5,
        "tokens": 4096,
        "owned": 5,
        "submitted": 40,
        "client_errors": 2,
        "prompt": 900,
        "completion": 700,
        "webhooks": [3, 4],
        "up": 1,
    }


def test_every_reason_has_a_series_before_its_first_task(registry: CollectorRegistry) -> None:
    ends = {
        reason: value(registry, "tasks_finished_total", reason=reason)
        for reason in ("stop", "length", "cancelled", "timeout", "error")
    }
    assert ends == {"stop": 20, "length": 0, "cancelled": 0, "timeout": 0, "error": 3}


def test_workers_are_counted_by_state_and_those_of_other_models_are_not(
    registry: CollectorRegistry, store: CountingStore
) -> None:
    store.records = [
        worker("a", "ready"),
        worker("b", "ready"),
        worker("c", "loading"),
        worker("d", "ready", slug="other-000000"),
    ]
    states = {
        state: value(registry, "workers", state=state)
        for state in ("loading", "ready", "draining", "stalled")
    }
    assert states == {"loading": 1, "ready": 2, "draining": 0, "stalled": 0}


def test_an_unknown_state_counts_as_other(registry: CollectorRegistry, store: CountingStore) -> None:
    """A newer worker during a rolling upgrade must not break the scrape or add a label."""
    assert value(registry, "workers", state="other") == 0
    unknown = replace(worker("a", "ready"), state="hibernating")  # type: ignore[arg-type]  # a newer state
    store.records = [unknown, worker("b", "ready")]
    assert value(registry, "workers", state="other") == 1
    assert value(registry, "workers", state="ready") == 1
    assert value(registry, "workers", state="hibernating") is None


def test_a_scrape_reads_the_queue_once_and_registering_never(
    registry: CollectorRegistry, store: CountingStore
) -> None:
    assert store.num_reads == 0
    expose(registry)
    assert store.num_reads == 1


@pytest.mark.parametrize("error", [redis.ConnectionError("away"), redis.TimeoutError("slow")])
def test_a_scrape_without_redis_succeeds_with_a_metric(
    registry: CollectorRegistry, store: CountingStore, error: Exception
) -> None:
    store.error = error
    body, _ = expose(registry)
    samples = [line for line in body.decode().splitlines() if not line.startswith("#")]
    assert samples == ["tokenmill_redis_up 0.0"]
    store.error = None
    assert registry.get_sample_value("tokenmill_redis_up") == 1


def test_other_errors_are_raised(registry: CollectorRegistry, store: CountingStore) -> None:
    store.error = KeyError("a bug")
    with pytest.raises(KeyError):
        expose(registry)


def test_values_that_are_not_stored_yet_are_zero(registry: CollectorRegistry, store: CountingStore) -> None:
    store.stats = replace(STATS, totals={}, waiting={})
    assert value(registry, "tasks_submitted_total") == 0
    assert value(registry, "queue_tasks", priority="4") == 0


def test_a_real_store_is_read(redis_client: "redis.Redis") -> None:
    task_store = TaskStore(redis_client)
    task_store.put_worker(worker("a", "ready"), ttl_seconds=60)
    registry = CollectorRegistry()
    registry.register(QueueCollector(task_store, SLUG, MODEL))
    assert registry.get_sample_value("tokenmill_redis_up") == 1
    assert value(registry, "queue_tasks", priority="2") == 0
    assert value(registry, "workers", state="ready") == 1


def test_an_unreachable_server_is_a_metric() -> None:
    client = redis.Redis(port=1, retry=Retry(NoBackoff(), 0), socket_timeout=2)
    registry = CollectorRegistry()
    registry.register(QueueCollector(TaskStore(client), SLUG, MODEL))
    assert registry.get_sample_value("tokenmill_redis_up") == 0
