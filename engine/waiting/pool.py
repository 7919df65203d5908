"""Who waits, in line or held outside of it, whose turn it is by what tenants were served, and why each waits.

Law: each waiting sequence is in line or held, never both, and has one reason at any time. Takes nobody in.
"""

from collections import Counter

from engine.config import EngineConfig
from engine.outputs import Skipped, WaitingReason
from engine.sequence import Sequence, SequenceStatus
from engine.waiting.ageing import Ageing
from engine.waiting.fair_share import sharing_of
from engine.waiting.queue import WaitingQueue


class WaitingPool:
    """`queue` is the line; those held stand outside of it and cost a step nothing."""

    def __init__(self, config: EngineConfig) -> None:
        self._sharing = sharing_of(config)
        self.queue = WaitingQueue(Ageing.of(config), self._sharing)
        self._held: dict[Sequence, WaitingReason] = {}
        self._num_held: Counter[WaitingReason] = Counter()
        self._passed_over: dict[Sequence, WaitingReason] = {}

    def __len__(self) -> int:
        return len(self.queue) + len(self._held)

    @property
    def held(self) -> list[Sequence]:
        return list(self._held)

    def hold(self, sequence: Sequence, reason: WaitingReason) -> None:
        self._held[sequence] = reason
        self._num_held[reason] += 1

    def release(self, sequence: Sequence) -> bool:
        """It is held no longer. False if it was not."""
        reason = self._held.pop(sequence, None)
        if reason is not None:
            self._num_held[reason] -= 1
        return reason is not None

    def join(self, sequence: Sequence) -> None:
        """Into the line, at its place."""
        self._sharing.joins(self._sharing.line(sequence.tenant))
        self.queue.add(sequence)

    def take(self, sequence: Sequence) -> None:
        """Out of the line, to be served."""
        self.queue.take(sequence)
        self._sharing.leaves(self._sharing.line(sequence.tenant))

    def leave(self, sequence: Sequence) -> None:
        """Out of the line, or out of where it was held. Raises KeyError when it is in neither."""
        if not self.release(sequence):
            self.queue.remove(sequence)
            self._sharing.leaves(self._sharing.line(sequence.tenant))

    def charge(self, sequence: Sequence) -> None:
        """Charge its tenant for what it knows and was not charged for."""
        self.queue.served(self._sharing.charge(sequence))

    def note(self, skipped: list[Skipped]) -> None:
        """Those whom the last step examined and passed over."""
        self._passed_over = dict(skipped)

    def reason(self, sequence: Sequence) -> WaitingReason:
        """Why it was not taken into the last step. Raises KeyError when it does not wait."""
        if sequence in self._held:
            return self._held[sequence]
        if sequence not in self.queue:
            raise KeyError(f"{sequence.request_id} does not wait")
        if sequence in self._passed_over:
            return self._passed_over[sequence]
        yields = self.queue.yields_to_another_tenant(sequence)
        return WaitingReason.FAIR_SHARE if yields else WaitingReason.BEHIND

    def reasons(self) -> dict[WaitingReason, int]:
        """How many wait for which reason; looks at those passed over, not at all who wait."""
        if not len(self):
            return {}
        queue = self.queue
        passed_over = [one for one in self._passed_over if one.status is SequenceStatus.WAITING]
        counts = self._num_held + Counter(self._passed_over[one] for one in passed_over)
        num_yielding = queue.num_yielding - sum(map(queue.yields_to_another_tenant, passed_over))
        counts[WaitingReason.FAIR_SHARE] = num_yielding
        counts[WaitingReason.BEHIND] = len(queue) - len(passed_over) - num_yielding
        return +counts
