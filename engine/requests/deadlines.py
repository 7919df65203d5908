"""What comes with a request beside its prompt and its parameters. Frozen values; knows no sequences."""

from dataclasses import dataclass, fields

from engine.sequence import FinishReason
from engine.validation import number

LONGEST_SECONDS = 366 * 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """The longest that a request may take, in seconds since it was accepted; None: no limit.

    `queue_seconds`: until it is first scheduled. `ttft_seconds`: until its first token. `total_seconds`:
    until its end. What is late ends as `timeout`, with what was generated so far. Raises `InvalidParameter`.
    """

    queue_seconds: float | None = None
    ttft_seconds: float | None = None
    total_seconds: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if (value := getattr(self, field.name)) is not None:
                number(field.name, value, 0.0, LONGEST_SECONDS)


NO_DEADLINES = Deadlines()


@dataclass(frozen=True, slots=True)
class ResumedOutput:
    """What an earlier engine generated of output `index`; with a `finish_reason` it has ended."""

    index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
