"""What happened to each request of a load."""

from array import array
from dataclasses import dataclass, field
from itertools import pairwise


class RequestFailed(Exception):
    """A request failed. `kind`: what all failures of this sort have in common."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(slots=True)
class Outcome:
    """One request. Times are seconds since the load began.

    `times`: when each piece of text arrived. `output_tokens`: as the server counts them; None: it does not.
    `lag`: seconds by which the request was started late. `error`: (kind, message) if it failed.
    """

    started: float
    lag: float = 0.0
    ended: float = 0.0
    times: "array[float]" = field(default_factory=lambda: array("d"))
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    error: tuple[str, str] | None = None

    @property
    def succeeded(self) -> bool:
        return self.error is None

    @property
    def num_tokens(self) -> int:
        """Output tokens; of a server that does not count them, the pieces of text."""
        return len(self.times) if self.output_tokens is None else self.output_tokens

    @property
    def ttft(self) -> float | None:
        """Seconds until the first piece of text."""
        return self.times[0] - self.started if self.times else None

    @property
    def seconds(self) -> float:
        return self.ended - self.started

    @property
    def tpot(self) -> float | None:
        """Mean seconds for each token after the first."""
        if not self.times or self.num_tokens < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.num_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces of text."""
        return [later - earlier for earlier, later in pairwise(self.times)]


@dataclass(frozen=True, slots=True)
class Load:
    """A finished load. `seconds`: from its first request to the end of the last.

    `cpu_seconds`: of the generator. `interrupted`: by the user, before all requests had ended.
    """

    outcomes: list[Outcome]
    seconds: float
    cpu_seconds: float
    interrupted: bool = False
