"""What a reaper could not treat. Each worker and each API process has one."""

from prometheus_client import CollectorRegistry

from monitoring.families import Families

DUTIES = ("leases", "unread", "moved", "overdue", "registries", "strays", "reaper")
"""Those of `worker/protocol/reaping.py`, and the thread itself."""


class ReapFailures:
    """Every verb may be called from any thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._failures = Families(registry).counters(
            "reap_failures_total",
            "Records that a reaper could not treat and has set aside, by duty; `reaper`: a whole run failed.",
            "duty",
            DUTIES,
        )

    def failed(self, duty: str) -> None:
        self._failures[duty].inc()
