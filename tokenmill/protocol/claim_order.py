"""The order in which waiting tasks are claimed."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimOrder:
    """The parameters of `claim_order.lua`, from a worker's settings.

    `ageing_seconds`: a waiting task gains one class in this time. `max_waiting_seconds`: a task that has
    waited for longer goes first. None disables either. `fair_sharing`: within a class the tenant that was
    served the fewest tokens goes first; otherwise the task that was accepted first.
    """

    ageing_seconds: float | None = 30.0
    max_waiting_seconds: float | None = 120.0
    fair_sharing: bool = True

    def to_text(self) -> str:
        """The form that the script reads."""
        return f"{_us(self.ageing_seconds)}:{_us(self.max_waiting_seconds)}:{int(self.fair_sharing)}"


DEFAULT_ORDER = ClaimOrder()

_NEVER_US = 10**15
"""More than thirty years."""


def _us(seconds: float | None) -> int:
    return _NEVER_US if seconds is None else min(_NEVER_US, max(1, round(seconds * 1e6)))
