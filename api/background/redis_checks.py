"""Checks every minute that Redis keeps what is written: eviction policy, append-only file, disk.

A fault is logged when it appears and when it is gone. `/metrics` and `/readyz` report the present ones.
"""

from collections.abc import Mapping

import redis
import structlog

from api.background.periodic import start_periodic
from api.redis_clients import is_unavailable
from monitoring.redis_state import RedisStateMetrics
from tokenmill.protocol.store import server_state
from tokenmill.protocol.store.server_state import Fault

_log = structlog.get_logger(__name__)

PERIOD_SECONDS = 60.0
RETRY_SECONDS = 5.0
"""Interval after a check during an outage."""


class RedisChecks:
    """One thread calls `check`; any thread may read `warnings`."""

    def __init__(self, client: redis.Redis, metrics: RedisStateMetrics) -> None:
        self._client = client
        self._metrics = metrics
        # Replaced as a whole, so that other threads can read it without a lock.
        self._faults: Mapping[Fault, str] = {}

    @property
    def warnings(self) -> list[str]:
        """One sentence for each present fault."""
        return list(self._faults.values())

    def check(self) -> float:
        """Check once. Returns the seconds until the next check. Raises no error of an outage."""
        try:
            found = server_state.faults(self._client, _is_refusal)
        except redis.RedisError as error:
            if not is_unavailable(error):
                raise
            # The client has logged the outage.
            return RETRY_SECONDS
        for name, text in found.items():
            if self._faults.get(name) != text:
                _log.error(text)
        for name in self._faults.keys() - found.keys():
            _log.warning("resolved", fault=self._faults[name])
        self._faults = found
        self._metrics.faults(found)
        return PERIOD_SECONDS


def start_redis_checks(checks: RedisChecks) -> None:
    """Start the thread. It ends with the process."""
    start_periodic("redis-checks", checks.check)


def _is_refusal(error: Exception) -> bool:
    """Whether the server does not know the command, or does not allow it to this user."""
    text = str(error).lower()
    return isinstance(error, redis.exceptions.NoPermissionError) or (
        isinstance(error, redis.ResponseError) and ("unknown command" in text or "not allowed" in text)
    )
