"""Checks once a minute that Redis keeps what it is given: eviction policy, append-only file, disk.

A fault is logged when it appears and when it is gone, is a metric, and stands in the reply of readiness.
"""

import logging
from collections.abc import Mapping

import redis

from monitoring.redis_state import RedisStateMetrics
from tokenmill.protocol.store import server_state
from tokenmill.protocol.store.server_state import Fault

logger = logging.getLogger(__name__)

PERIOD_SECONDS = 60.0
RETRY_SECONDS = 5.0
"""After a check that Redis did not answer."""


class RedisChecks:
    """`check` belongs to one thread; `warnings` may be read by any."""

    def __init__(self, client: redis.Redis, metrics: RedisStateMetrics) -> None:
        self._client = client
        self._metrics = metrics
        # Replaced, never changed.
        self._faults: Mapping[Fault, str] = {}

    @property
    def warnings(self) -> list[str]:
        """A sentence for each present fault."""
        return list(self._faults.values())

    def check(self) -> float:
        """Look once; returns the seconds until the next time."""
        try:
            found = server_state.faults(self._client, _is_refusal)
        except redis.RedisError:
            # An outage has its own line.
            return RETRY_SECONDS
        for name, text in found.items():
            if self._faults.get(name) != text:
                logger.error("%s", text)
        for name in self._faults.keys() - found.keys():
            logger.warning("no longer: %s", self._faults[name])
        self._faults = found
        self._metrics.faults(found)
        return PERIOD_SECONDS


def _is_refusal(error: Exception) -> bool:
    """The command is unknown there, or not allowed to this user."""
    text = str(error).lower()
    return isinstance(error, redis.exceptions.NoPermissionError) or (
        isinstance(error, redis.ResponseError) and ("unknown command" in text or "not allowed" in text)
    )
