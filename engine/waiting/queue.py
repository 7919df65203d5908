"""The queue of waiting sequences: promoted ones first, then by aged priority, then by arrival.

A preempted sequence returns to its old position. Sequences of one priority are kept in order of arrival and
do not pass each other. So only the first one of each priority can be next, and the cost of finding it does
not depend on how many wait.
"""

import bisect
import math
from collections.abc import Iterator
from operator import itemgetter

from engine.sequence import ORDER, Sequence
from engine.waiting.ageing import PROMOTED_RANK, Ageing

SortKey = tuple[float, float, tuple[float, str, int]]
"""Rank, start of the wait (0 unless promoted), arrival. Lower goes first."""


class WaitingQueue:
    """`head` is the next sequence to admit."""

    def __init__(self, ageing: Ageing) -> None:
        self._ageing = ageing
        self._now = 0.0
        # By priority, each in order of arrival and not empty. A list of 100,000 takes 20 us for a removal
        # at its front.
        self._by_priority: dict[int, list[Sequence]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_priority.values()))

    def __contains__(self, sequence: Sequence) -> bool:
        sequences = self._by_priority.get(sequence.priority, [])
        index = bisect.bisect_left(sequences, sequence.order, key=ORDER)
        return index < len(sequences) and sequences[index] is sequence

    def __iter__(self) -> Iterator[Sequence]:
        """All sequences in the order in which they would be admitted if nothing else changed."""
        keyed: list[tuple[SortKey, Sequence]] = []
        for sequences in self._by_priority.values():
            bound = (-math.inf, -math.inf)
            for sequence in sequences:
                rank, since, arrival = self._sort_key(sequence)
                # No sequence passes an earlier one of its own priority.
                bound = max(bound, (rank, since))
                keyed.append(((*bound, arrival), sequence))
        return (sequence for _, sequence in sorted(keyed, key=itemgetter(0)))

    @property
    def head(self) -> Sequence | None:
        firsts = [sequences[0] for sequences in self._by_priority.values()]
        return min(firsts, key=self._sort_key) if firsts else None

    @property
    def best_priority(self) -> int:
        """The best priority of the waiting sequences, without ageing. Raises ValueError if none waits."""
        return min(self._by_priority)

    @property
    def is_head_promoted(self) -> bool:
        return any(self.is_promoted(sequences[0]) for sequences in self._by_priority.values())

    def is_promoted(self, sequence: Sequence) -> bool:
        """Whether `sequence` has waited for `max_waiting_seconds`."""
        return self._ageing.is_promoted(sequence.waiting_since, self._now)

    def advance(self, now: float) -> None:
        """Set the time, in seconds on the scheduler's clock, from which ranks follow."""
        self._now = now

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self._by_priority.setdefault(sequence.priority, []), sequence, key=ORDER)

    def remove(self, sequence: Sequence) -> None:
        """Raises KeyError if the queue does not contain `sequence`."""
        if sequence not in self:
            raise KeyError(sequence.request_id)
        sequences = self._by_priority[sequence.priority]
        del sequences[bisect.bisect_left(sequences, sequence.order, key=ORDER)]
        if not sequences:
            del self._by_priority[sequence.priority]

    def _sort_key(self, sequence: Sequence) -> SortKey:
        since = sequence.waiting_since
        rank = self._ageing.rank(sequence.priority, since, self._now)
        return rank, since if rank == PROMOTED_RANK else 0.0, sequence.order[1:]
