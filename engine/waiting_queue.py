"""The line of waiting sequences: by priority, then by arrival, whoever joins when.

A preempted or resumed sequence keeps its arrival and so takes up its old place. Decides nothing.
"""

from collections import deque
from collections.abc import Iterator

from engine.sequence import Sequence


class WaitingQueue:
    """Waiting sequences in their `order`; a step looks at the head only, however many wait."""

    def __init__(self) -> None:
        self._lines: dict[int, deque[Sequence]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[Sequence]:
        for priority in sorted(self._lines):
            yield from self._lines[priority]

    @property
    def head(self) -> Sequence | None:
        return self._lines[min(self._lines)][0] if self._lines else None

    def add(self, sequence: Sequence) -> None:
        line = self._lines.setdefault(sequence.priority, deque())
        if not line or line[-1].order < sequence.order:
            line.append(sequence)
        else:
            place = next(i for i, other in enumerate(line) if sequence.order < other.order)
            line.insert(place, sequence)

    def remove(self, sequence: Sequence) -> None:
        """Raises ValueError when it is not in line."""
        line = self._lines.get(sequence.priority, deque())
        line.remove(sequence)
        if not line:
            del self._lines[sequence.priority]

    def pop(self) -> Sequence:
        """Take the head out. Raises IndexError when nobody waits."""
        head = self.head
        if head is None:
            raise IndexError("nobody waits")
        self.remove(head)
        return head
