"""How the order of claims depends on the workers' settings."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimOrder:
    """The limits of the rule in `turns.lua`.

    A task counts one class better for each `ageing_seconds` that it has waited, and goes before all others
    after `max_waiting_seconds`; None: never. `fair_sharing`: of a class, the tenant that was served the
    fewest tokens goes first; else the task that was accepted first.
    """

    ageing_seconds: float | None = 30.0
    max_waiting_seconds: float | None = 120.0
    fair_sharing: bool = True

    def to_text(self) -> str:
        """As the script reads it."""
        return f"{_us(self.ageing_seconds)}:{_us(self.max_waiting_seconds)}:{int(self.fair_sharing)}"


DEFAULT_ORDER = ClaimOrder()

_NEVER_US = 10**15
"""Thirty years."""


def _us(seconds: float | None) -> int:
    return _NEVER_US if seconds is None else min(_NEVER_US, max(1, round(seconds * 1e6)))
