"""All waiting sequences: those in the queue, those deferred outside of it, and why each of them waits.

Invariants: a waiting sequence is either queued or deferred, and has exactly one reason.
"""

from collections import Counter

from engine.config import EngineConfig
from engine.outputs import Skipped, WaitingReason
from engine.sequence import Sequence, SequenceStatus
from engine.waiting.ageing import Ageing
from engine.waiting.queue import WaitingQueue


class WaitingPool:
    """The `queue`, and the deferred sequences: these wait for something other than their turn, and no step
    examines them.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.queue = WaitingQueue(Ageing.of(config))
        self._deferred: dict[Sequence, WaitingReason] = {}
        self._num_deferred: Counter[WaitingReason] = Counter()
        self._skipped: dict[Sequence, WaitingReason] = {}

    def __len__(self) -> int:
        return len(self.queue) + len(self._deferred)

    @property
    def deferred(self) -> list[Sequence]:
        return list(self._deferred)

    def defer(self, sequence: Sequence, reason: WaitingReason) -> None:
        self._deferred[sequence] = reason
        self._num_deferred[reason] += 1

    def enqueue(self, sequence: Sequence) -> None:
        """Move a deferred sequence into the queue. Does nothing if it is not deferred."""
        if self._remove_deferred(sequence):
            self.queue.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a queued or deferred sequence. Raises KeyError if it is neither."""
        if not self._remove_deferred(sequence):
            self.queue.remove(sequence)

    def record_skipped(self, skipped: list[Skipped]) -> None:
        """Record which sequences the last step examined and did not schedule."""
        self._skipped = dict(skipped)

    def reason(self, sequence: Sequence) -> WaitingReason:
        """Why the last step did not admit `sequence`. Raises KeyError if it does not wait."""
        if sequence in self._deferred:
            return self._deferred[sequence]
        if sequence not in self.queue:
            raise KeyError(f"{sequence.request_id} is not waiting")
        return self._skipped.get(sequence, WaitingReason.BEHIND)

    def reasons(self) -> dict[WaitingReason, int]:
        """The number of waiting sequences by reason. The cost does not depend on how many wait."""
        if not len(self):
            return {}
        waiting = SequenceStatus.WAITING
        skipped = Counter(reason for sequence, reason in self._skipped.items() if sequence.status is waiting)
        counts = self._num_deferred + skipped
        counts[WaitingReason.BEHIND] = len(self.queue) - skipped.total()
        return +counts

    def _remove_deferred(self, sequence: Sequence) -> bool:
        """Whether it was deferred."""
        reason = self._deferred.pop(sequence, None)
        if reason is not None:
            self._num_deferred[reason] -= 1
        return reason is not None
