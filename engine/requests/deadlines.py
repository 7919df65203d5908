"""Deadlines of requests, and a heap that finds the expired ones.

A step looks at the earliest deadline only. Entries of requests that finished or met a deadline are dropped
lazily, so that they neither expire nor accumulate.
"""

import heapq
import itertools
from dataclasses import dataclass, fields
from enum import Enum
from typing import Generic, Protocol, TypeVar

from engine.validation import Number

LONGEST_SECONDS = 366 * 86400.0

_MINIMUM_STALE_ENTRIES = 64
"""The heap is not searched for stale entries while it has fewer entries than this beyond the live ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Time limits of a request in seconds since it was accepted; None: no limit. Raises `InvalidParameter`.

    `queue_timeout_seconds` ends when it is first scheduled, `ttft_timeout_seconds` at its first token,
    `timeout_seconds` when it finishes. A request that misses one ends as `timeout` and keeps its tokens.
    """

    queue_timeout_seconds: float | None = None
    ttft_timeout_seconds: float | None = None
    timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if (value := getattr(self, field.name)) is not None:
                Number(minimum=0.0, maximum=LONGEST_SECONDS).check(field.name, value)


NO_DEADLINES = Deadlines()


class Limit(Enum):
    """The event that must happen in time. The value is the error message, with the name of the HTTP field."""

    QUEUE = "not started within queue_timeout_seconds"
    TTFT = "no token within ttft_timeout_seconds"
    TOTAL = "not done within timeout_seconds"


class Timed(Protocol):
    """A request with deadlines."""

    def is_subject_to(self, limit: Limit) -> bool:
        """Whether the request is unfinished and has not reached the event of `limit`."""
        ...


TimedT = TypeVar("TimedT", bound=Timed)


class DeadlineHeap(Generic[TimedT]):
    """The deadlines of many requests, earliest first, in seconds on the engine's clock."""

    def __init__(self) -> None:
        #: Deadline, tie-breaker, request, limit, the limit's seconds.
        self._heap: list[tuple[float, int, TimedT, Limit, float]] = []
        self._ties = itertools.count()
        self._compact_above = _MINIMUM_STALE_ENTRIES

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: TimedT, accepted: float, deadlines: Deadlines) -> None:
        """`accepted`: the time on the engine's clock that `deadlines` count from."""
        for limit, seconds in (
            (Limit.QUEUE, deadlines.queue_timeout_seconds),
            (Limit.TTFT, deadlines.ttft_timeout_seconds),
            (Limit.TOTAL, deadlines.timeout_seconds),
        ):
            if seconds is not None and request.is_subject_to(limit):
                entry = (accepted + seconds, next(self._ties), request, limit, seconds)
                heapq.heappush(self._heap, entry)
        if len(self._heap) > self._compact_above:
            self._compact()

    def pop_expired(self, now: float) -> list[tuple[TimedT, str]]:
        """Requests with a deadline at or before `now`, each once, with the error message."""
        expired: dict[TimedT, str] = {}
        while self._heap and self._heap[0][0] <= now:
            _, _, request, limit, seconds = heapq.heappop(self._heap)
            if request.is_subject_to(limit):
                expired.setdefault(request, f"{limit.value} ({seconds:g} s)")
        return list(expired.items())

    def _compact(self) -> None:
        """Drop stale entries. The threshold doubles, so that the cost per added request stays constant."""
        self._heap = [entry for entry in self._heap if entry[2].is_subject_to(entry[3])]
        heapq.heapify(self._heap)
        self._compact_above = 2 * len(self._heap) + _MINIMUM_STALE_ENTRIES
