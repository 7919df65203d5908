"""What a reaper could not treat. Each worker and each API process has one."""

from prometheus_client import CollectorRegistry

from monitoring.families import Families

DUTIES = ("leases", "unread", "moved", "overdue", "registries", "strays", "reaper")
"""Those of `tokenmill/protocol/store/reaping.py`, and the thread itself."""


class ReapFailures:
    """Every verb may be called from any thread. `by_api`: of the API's reaper, which has a family of its
    own.
    """

    def __init__(self, registry: CollectorRegistry, *, by_api: bool = False) -> None:
        whose = "the API's reaper" if by_api else "this worker's reaper"
        self._failures = Families(registry).counters(
            "housekeeping_failures_total" if by_api else "reap_failures_total",
            f"Records that {whose} could not treat and has set aside, by duty; `reaper`: a whole run failed.",
            "duty",
            DUTIES,
        )

    def failed(self, duty: str) -> None:
        self._failures[duty].inc()
