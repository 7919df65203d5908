"""Distributes the time: a share for each group, and a time limit for the first run of each cell.

All first runs come before any repeat. An engine is stopped early once its target is decided and others need
the time; afterwards it gets only time that remains.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.serving.estimates import LIKELY, Estimates
from benchmarks.serving.plan import OWN, Cell

LONGEST_RUN, LONGEST_LOAD = 1800.0, 900.0
"""Seconds that nobody waits longer for, however much time there is."""


class Needs(NamedTuple):
    """Of a group: the seconds of its first round, and of all further ones."""

    first: float
    repeats: float


def share(left: float, needs: Sequence[Needs]) -> float:
    """Of the time that is left, what the first of several groups may take.

    Its first round, and of what all first rounds leave a part as large as its repeats are among all repeats.
    Where the time does not hold all first rounds, a part as large as its own.
    """
    first = sum(one.first for one in needs)
    repeats = sum(one.repeats for one in needs)
    if len(needs) == 1:
        return left
    if left < first or not repeats:
        return left * needs[0].first / first if first else left / len(needs)
    return needs[0].first + (left - first) * needs[0].repeats / repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Of one group. `repeats`: of each cell that are wanted."""

    estimates: Estimates
    repeats: int

    def patience(self, cell: Cell, later: Collection[Cell], left: float, loaded: Collection[str]) -> float:
        """Seconds that the first run of a cell may take, its load and its warm-up not counted; 0: there is no
        time for it.

        `later`: the cells that have their first run after it. `left`: seconds that are left to the group.
        """
        if cell.system in OWN:
            return LONGEST_RUN
        estimates = self.estimates
        slow = {one.system for one in estimates.record.cut_short if one.place[:2] == estimates.group}
        left -= estimates.warm_up(cell) + estimates.loads([cell], loaded)
        waiting = [one for one in later if one.system not in slow]
        unclaimed = left - estimates.first_round(waiting, {*loaded, cell.system})
        if cell.system in slow:
            has_time = unclaimed >= self.least(cell)
        else:
            has_time = left >= min(self.least(cell), LIKELY * estimates.run(cell))
        if not has_time:
            return 0.0
        repeats = estimates.repeats([cell, *waiting], self.repeats)
        return min(LONGEST_RUN, max(self.least(cell), unclaimed - repeats))

    def least(self, cell: Cell) -> float:
        """Nothing new would be learnt in less time than this."""
        return max(self.estimates.enough(cell), self.estimates.record.cut_short.get(cell, 0.0))
