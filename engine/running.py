"""Who holds a seat, and who of them has more to compute than a newest token.

Law: `queue` and `prefilling` are sorted by `Sequence.order`, and the second is the part of the first that
does not decode yet. Who enters has a seat, and who leaves has given it back. Knows no blocks and no line.
"""

import bisect

from engine.seats import Seats
from engine.sequence import ORDER, Sequence


class Running:
    """`seats`: as many as sequences may run at once."""

    def __init__(self, num_seats: int) -> None:
        self.seats = Seats(num_seats)
        self.queue: list[Sequence] = []
        self.prefilling: list[Sequence] = []

    def enter(self, sequence: Sequence, num_found_tokens: int) -> None:
        """Onto a free seat, with what it found in the cache. Raises IndexError when none is free."""
        sequence.admit(self.seats.take(), num_found_tokens)
        bisect.insort(self.queue, sequence, key=ORDER)
        if not sequence.is_decoding:
            bisect.insort(self.prefilling, sequence, key=ORDER)

    def leave(self, sequence: Sequence) -> None:
        """Off its seat."""
        del self.queue[bisect.bisect_left(self.queue, sequence.order, key=ORDER)]
        if sequence in self.prefilling:
            self.prefilling.remove(sequence)
        assert sequence.seat is not None
        self.seats.give_back(sequence.seat)

    def catch_up(self, sequence: Sequence) -> None:
        """It may have computed all but its newest token: then it is one of those that decode."""
        if sequence.is_decoding and sequence in self.prefilling:
            self.prefilling.remove(sequence)

    def by_need(self, members: list[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Those of `members` that decode, and those that compute what they know already."""
        if not self.prefilling:
            return members, []
        prefilling = set(self.prefilling)
        decoding = [one for one in members if one not in prefilling]
        return decoding, [one for one in members if one in prefilling]
