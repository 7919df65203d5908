"""The running sequences, and which of them decode.

Invariants: `queue` is sorted by `Sequence.order`. Whether a sequence decodes is computed from its own numbers
each time and stored nowhere, so no path that a step took can leave it in the wrong list. A sequence that
enters has a slot; one that leaves has given it back. Knows no blocks and no waiting queue.
"""

import bisect

from engine.scheduling.slots import Slots
from engine.sequence import ORDER, Sequence


class Running:
    """`slots`: as many as sequences may run at once."""

    def __init__(self, num_slots: int) -> None:
        self.slots = Slots(num_slots)
        self.queue: list[Sequence] = []

    def enter(self, sequence: Sequence, num_found_tokens: int) -> None:
        """Onto a free slot, with what it found in the cache. Raises IndexError when none is free."""
        sequence.admit(self.slots.take(), num_found_tokens)
        bisect.insort(self.queue, sequence, key=ORDER)

    def leave(self, sequence: Sequence) -> None:
        """Off its slot."""
        del self.queue[bisect.bisect_left(self.queue, sequence.order, key=ORDER)]
        assert sequence.slot is not None
        self.slots.give_back(sequence.slot)


def by_need(members: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """The sequences that decode, and those with other known tokens to compute; both in order of `members`.

    A sequence whose known tokens are all computed is in neither list.
    """
    decoding = [one for one in members if one.is_decoding]
    if len(decoding) == len(members):
        return decoding, []
    return decoding, [one for one in members if one.num_uncomputed_tokens and not one.is_decoding]
