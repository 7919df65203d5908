"""Creates metrics with one prefix and common labels. Every known series exists from the start.

A series that appears with its first event is missing from sums before, and its first event from rates.
"""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

PREFIX = "tokenmill_"

TIME_BUCKETS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560,
)  # fmt: skip
"""Seconds, for all durations: from a step on a fast device to a request behind a backlog."""

RATIO_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1)
"""Shares of a limit."""

POWER_BUCKETS = tuple(2**power for power in range(16))
"""Counts of one step, 1 to 32,768."""

Metric = TypeVar("Metric", Counter, Gauge, Histogram)


def length_buckets(longest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, ... below `longest` tokens, then `longest`, so that every length fits."""
    ladder = (step * 10**power for power in range(len(str(longest))) for step in (1, 2, 5))
    return (*(bound for bound in ladder if bound < longest), longest)


class Families:
    """Creates metrics that share labels, such as the model's name.

    The plural methods create one series for each known value of one more label, and return them by value.
    Registering a name twice raises ValueError.
    """

    def __init__(self, registry: CollectorRegistry, **labels: str) -> None:
        self._registry = registry
        self._labels = labels

    def counter(self, name: str, text: str) -> Counter:
        """`name` ends in `_total`."""
        return self._one(Counter(PREFIX + name, text, tuple(self._labels), registry=self._registry))

    def counters(self, name: str, text: str, label: str, values: Iterable[str]) -> dict[str, Counter]:
        family = Counter(PREFIX + name, text, (*self._labels, label), registry=self._registry)
        return self._each(family, label, values)

    def gauge(self, name: str, text: str) -> Gauge:
        return self._one(Gauge(PREFIX + name, text, tuple(self._labels), registry=self._registry))

    def gauges(self, name: str, text: str, label: str, values: Iterable[str]) -> dict[str, Gauge]:
        family = Gauge(PREFIX + name, text, (*self._labels, label), registry=self._registry)
        return self._each(family, label, values)

    def histogram(self, name: str, text: str, buckets: Sequence[float] = TIME_BUCKETS) -> Histogram:
        family = Histogram(PREFIX + name, text, tuple(self._labels), registry=self._registry, buckets=buckets)
        return self._one(family)

    def histograms(
        self, name: str, text: str, label: str, values: Iterable[str], buckets: Sequence[float] = TIME_BUCKETS
    ) -> dict[str, Histogram]:
        family = Histogram(
            PREFIX + name, text, (*self._labels, label), registry=self._registry, buckets=buckets
        )
        return self._each(family, label, values)

    def _one(self, family: Metric) -> Metric:
        return family.labels(**self._labels) if self._labels else family

    def _each(self, family: Metric, label: str, values: Iterable[str]) -> dict[str, Metric]:
        return {value: family.labels(**self._labels, **{label: value}) for value in values}
