"""How waiting makes a sequence more urgent, so that none waits for ever.

Law: a standing gets better with time, never worse, and whoever waited long enough goes before all others.
Knows no sequence and no clock: times are told.
"""

import math
from dataclasses import dataclass

from engine.config import EngineConfig

PROMOTED = -math.inf
"""The standing of one that goes before all others."""
_MOST_CLASSES = 100


@dataclass(frozen=True, slots=True)
class Ageing:
    """One class better for each `ageing_seconds`, promoted after `max_waiting_seconds`; None: never."""

    ageing_seconds: float | None
    max_waiting_seconds: float | None

    @classmethod
    def of(cls, config: EngineConfig) -> "Ageing":
        return cls(config.ageing_seconds, config.max_waiting_seconds)

    @property
    def longest_seconds(self) -> float:
        """After so long nothing gets better."""
        return max(self.max_waiting_seconds or 0.0, (self.ageing_seconds or 0.0) * _MOST_CLASSES)

    def standing(self, priority: int, since: float, now: float) -> float:
        """What one of `priority` counts as: that class, a better one down to 0, or `PROMOTED`."""
        if now >= self._promoted_at(since):
            return PROMOTED
        return min(priority, max(0, priority - self._num_classes_gained(since, now)))

    def next_change(self, priority: int, since: float, now: float) -> float:
        """When its standing is next better than it is at `now`; infinity: never."""
        promoted_at = self._promoted_at(since)
        if now >= promoted_at:
            return math.inf
        num_gained = self._num_classes_gained(since, now)
        if self.ageing_seconds is None or num_gained >= priority:
            return promoted_at
        return min(promoted_at, since + (num_gained + 1) * self.ageing_seconds)

    def _promoted_at(self, since: float) -> float:
        return math.inf if self.max_waiting_seconds is None else (since + self.max_waiting_seconds)

    def _num_classes_gained(self, since: float, now: float) -> int:
        if self.ageing_seconds is None or now <= since:
            return 0
        num_gained = int((now - since) / self.ageing_seconds)
        # A quotient is rounded: by the same sums as the times of change, or a change would come twice.
        if since + num_gained * self.ageing_seconds > now:
            return num_gained - 1
        return num_gained + (since + (num_gained + 1) * self.ageing_seconds <= now)
