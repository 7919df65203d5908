"""How waiting makes a sequence more urgent, so that none waits for ever.

Law: a standing gets better with time, never worse, and whoever waited long enough goes before all others.
Knows no queue and no clock: the time is told.
"""

import math
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.sequence import Sequence

PROMOTED = -math.inf
"""The standing of one that goes before all others."""


@dataclass(frozen=True, slots=True)
class Ageing:
    """One class better for each `ageing_seconds`, promoted after `max_waiting_seconds`; None: never."""

    ageing_seconds: float | None
    max_waiting_seconds: float | None

    @classmethod
    def of(cls, config: EngineConfig) -> "Ageing":
        return cls(config.ageing_seconds, config.max_waiting_seconds)

    def standing(self, sequence: Sequence, now: float) -> float:
        """The priority class that `sequence` counts as: its own, a better one down to 0, or `PROMOTED`."""
        if now >= self._promoted_at(sequence):
            return PROMOTED
        return min(sequence.priority, max(0, sequence.priority - self._num_classes_gained(sequence, now)))

    def next_change(self, sequence: Sequence, now: float) -> float:
        """When its standing is next better than it is at `now`; infinity: never."""
        promoted_at = self._promoted_at(sequence)
        if now >= promoted_at:
            return math.inf
        num_gained = self._num_classes_gained(sequence, now)
        if self.ageing_seconds is None or num_gained >= sequence.priority:
            return promoted_at
        return min(promoted_at, sequence.waiting_since + (num_gained + 1) * self.ageing_seconds)

    def _promoted_at(self, sequence: Sequence) -> float:
        return (
            math.inf
            if self.max_waiting_seconds is None
            else (sequence.waiting_since + self.max_waiting_seconds)
        )

    def _num_classes_gained(self, sequence: Sequence, now: float) -> int:
        if self.ageing_seconds is None or now <= sequence.waiting_since:
            return 0
        num_gained = int((now - sequence.waiting_since) / self.ageing_seconds)
        # A quotient is rounded: by the same sums as the times of change, or a change would come twice.
        if sequence.waiting_since + num_gained * self.ageing_seconds > now:
            return num_gained - 1
        return num_gained + (sequence.waiting_since + (num_gained + 1) * self.ageing_seconds <= now)
