"""The running sequences and their slots: the rows of the runner's arrays.

Invariants: `queue` is sorted by `Sequence.order`. A slot is free or belongs to one running sequence. A freed
slot is reported once. Whether a sequence decodes follows from its token counts and is stored nowhere.
"""

import bisect

from engine.sequence import ORDER, Sequence


class RunningSequences:
    """`num_slots`: how many sequences may run at once. Slots are numbered from 0."""

    def __init__(self, num_slots: int) -> None:
        self.queue: list[Sequence] = []
        self._free_slots = list(reversed(range(num_slots)))
        self._released_slots: list[int] = []

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def allocate_slot(self) -> int:
        """Raises IndexError if no slot is free."""
        return self._free_slots.pop()

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self.queue, sequence, key=ORDER)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, and free its slot."""
        del self.queue[bisect.bisect_left(self.queue, sequence.order, key=ORDER)]
        assert sequence.slot is not None
        self._free_slots.append(sequence.slot)
        self._released_slots.append(sequence.slot)

    def pop_released_slots(self) -> tuple[int, ...]:
        """The slots that lost their sequence since the last call."""
        released = tuple(self._released_slots)
        self._released_slots.clear()
        return released

    def restore_released_slots(self, slots: tuple[int, ...]) -> None:
        """Report `slots` again: the step that reported them is not executed."""
        self._released_slots += slots


def split_by_phase(sequences: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """The sequences that decode and those that prefill, each in the given order.

    A sequence without uncomputed tokens is in neither list.
    """
    decoding = [one for one in sequences if one.is_decoding]
    if len(decoding) == len(sequences):
        return decoding, []
    return decoding, [one for one in sequences if one.num_uncomputed_tokens and not one.is_decoding]
