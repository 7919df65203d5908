"""Which requests are late: a heap of moments, of which a step looks at the earliest only.

Law: a request that ended or reached what a limit is for is never late by it, and does not stay in memory for
it. Knows neither sequences nor the clock.
"""

import heapq
import itertools
from enum import Enum
from typing import Generic, Protocol, TypeVar

from engine.requests.deadlines import Deadlines

_SPARE = 64
"""Entries that may be out of date before it is worth looking for them."""


class Limit(Enum):
    """What must be reached in time; the value says what was not, and the user's name for it."""

    QUEUE = "not started within queue_timeout_seconds"
    TTFT = "no token within ttft_timeout_seconds"
    TOTAL = "not done within timeout_seconds"


class Timed(Protocol):
    def awaits(self, limit: Limit) -> bool:
        """It has not ended, nor reached what `limit` is for."""
        ...


TimedT = TypeVar("TimedT", bound=Timed)


class DeadlineHeap(Generic[TimedT]):
    """Moments by which requests must have come somewhere, in seconds on one clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, TimedT, Limit, float]] = []
        self._ties = itertools.count()
        self._clean_at = _SPARE

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: TimedT, accepted: float, deadlines: Deadlines) -> None:
        """`accepted`: the moment that the limits of `deadlines` count from."""
        for limit, seconds in (
            (Limit.QUEUE, deadlines.queue_seconds),
            (Limit.TTFT, deadlines.ttft_seconds),
            (Limit.TOTAL, deadlines.total_seconds),
        ):
            if seconds is not None and request.awaits(limit):
                entry = (accepted + seconds, next(self._ties), request, limit, seconds)
                heapq.heappush(self._heap, entry)
        if len(self._heap) > self._clean_at:
            self._clean()

    def take_late(self, now: float) -> list[tuple[TimedT, str]]:
        """Those whose time is up, each with the reason in words; each is told once."""
        late: dict[TimedT, str] = {}
        while self._heap and self._heap[0][0] <= now:
            _, _, request, limit, seconds = heapq.heappop(self._heap)
            if request.awaits(limit):
                late.setdefault(request, f"{limit.value} ({seconds:g} s)")
        return list(late.items())

    def _clean(self) -> None:
        """Forget what is out of date; done so rarely that it costs nothing per request."""
        self._heap = [entry for entry in self._heap if entry[2].awaits(entry[3])]
        heapq.heapify(self._heap)
        self._clean_at = 2 * len(self._heap) + _SPARE
