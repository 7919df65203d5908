"""Failures of the reaper. Each worker and each API process runs one."""

from prometheus_client import CollectorRegistry

from monitoring.families import Families

DUTIES = ("leases", "unread", "moved", "overdue", "registries", "strays", "reaper")
"""The duties of `tokenmill/protocol/store/reaping.py`, and `reaper` for a whole run."""


class ReapFailures:
    """Thread-safe. `by_api`: for the API's reaper, which has its own family."""

    def __init__(self, registry: CollectorRegistry, *, by_api: bool = False) -> None:
        whose = "the API's reaper" if by_api else "this worker's reaper"
        self._failures = Families(registry).counters(
            "housekeeping_failures_total" if by_api else "reap_failures_total",
            f"Records that {whose} could not process and skips, by duty. `reaper`: a whole run failed.",
            "duty",
            DUTIES,
        )

    def failed(self, duty: str) -> None:
        self._failures[duty].inc()
