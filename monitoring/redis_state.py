"""Whether Redis is configured to keep accepted tasks, as the API last checked."""

from collections.abc import Collection

from prometheus_client import CollectorRegistry

from monitoring.families import Families

FAULTS = ("evicts", "not_persistent", "write_failed", "unknown")


class RedisStateMetrics:
    """Thread-safe."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._faults = Families(registry).gauges(
            "redis_unsafe",
            "1 while Redis may lose accepted tasks, by reason. Checked once a minute.",
            "reason",
            FAULTS,
        )

    def faults(self, present: Collection[str]) -> None:
        for name, gauge in self._faults.items():
            gauge.set(int(name in present))
