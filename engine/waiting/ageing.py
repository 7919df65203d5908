"""Ageing: waiting raises the rank of a sequence, so that none starves."""

import math
from dataclasses import dataclass

from engine.config import EngineConfig

PROMOTED_RANK = -math.inf
"""The rank of a sequence that has waited for `max_waiting_seconds`: it precedes all others."""


@dataclass(frozen=True, slots=True)
class Ageing:
    """The rank rises by one class per `ageing_seconds`, and to the top after `max_waiting_seconds`.

    None switches the rule off. All times are seconds on the scheduler's clock.
    """

    ageing_seconds: float | None
    max_waiting_seconds: float | None

    @classmethod
    def of(cls, config: EngineConfig) -> "Ageing":
        return cls(config.ageing_seconds, config.max_waiting_seconds)

    def is_promoted(self, waiting_since: float, now: float) -> bool:
        return self.max_waiting_seconds is not None and now >= waiting_since + self.max_waiting_seconds

    def rank(self, priority: int, waiting_since: float, now: float) -> float:
        """`PROMOTED_RANK`, or the aged priority class, which is never better than 0. Lower goes first."""
        if self.is_promoted(waiting_since, now):
            return PROMOTED_RANK
        if self.ageing_seconds is None or now <= waiting_since:
            return priority
        return min(priority, max(0, priority - int((now - waiting_since) / self.ageing_seconds)))
