"""The limits in seconds that a request may set for itself, and what is told where one has passed."""

from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields

from tokenmill.protocol.messages import TaskError

LONGEST_SECONDS = 366 * 86400.0
"""The engine's own bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimits:
    """Seconds since the acceptance, None for no limit: until a step first takes the task, until its first
    token, until its end. Names are those of the fields of a request. Raises ValueError for what is no number
    of seconds.
    """

    queue_timeout_seconds: float | None = None
    ttft_timeout_seconds: float | None = None
    timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            seconds = getattr(self, field.name)
            # NaN compares false with everything.
            if seconds is not None and not 0 <= seconds <= LONGEST_SECONDS:
                raise ValueError(f"{field.name}: seconds, 0 to {LONGEST_SECONDS:.0f}, not {seconds}")

    def __iter__(self) -> Iterator[float | None]:
        return iter(astuple(self))


NO_LIMITS = TimeLimits()

_MISSED = {
    "queue_timeout_seconds": "not started",
    "ttft_timeout_seconds": "no token",
    "timeout_seconds": "not done",
}
NAMES = tuple(_MISSED)

PLACE = "{}"
"""Stands in a message for the seconds, which a script puts in."""


def timeout_error(name: str, seconds: str = PLACE) -> TaskError:
    """Why a task ended whose limit `name` passed while it waited; in the engine's own words."""
    message = f"{_MISSED[name]} within {name} ({seconds} s)"
    return TaskError(type="timeout_error", code="timeout", message=message)
