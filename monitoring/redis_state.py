"""Whether Redis is set up so that it keeps tasks, as the API last saw it. Knows no Redis."""

from collections.abc import Collection

from prometheus_client import CollectorRegistry

from monitoring.families import Families

FAULTS = ("evicts", "not_persistent", "write_failed", "unknown")


class RedisStateMetrics:
    """Every verb may be called from any thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._faults = Families(registry).gauges(
            "redis_unsafe",
            "1 while Redis may lose accepted tasks, by why; checked once a minute.",
            "reason",
            FAULTS,
        )

    def faults(self, present: Collection[str]) -> None:
        for name, gauge in self._faults.items():
            gauge.set(int(name in present))
