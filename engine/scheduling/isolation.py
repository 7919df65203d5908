"""A step of one request alone: who takes part, and who gives way to it.

Law: nobody else is stepped. The others keep slots and blocks while it can do without these; then the last in
order loses first, those that are pinned after all others. Alone every request fits, so it always goes on.
Chooses; takes nothing away.
"""

from collections.abc import Callable, Iterable

from engine.outputs import WaitingReason
from engine.scheduling.preemption import Preemption
from engine.scheduling.step_plan import StepPlan
from engine.sequence import Sequence
from engine.waiting.queue import WaitingQueue

_ROOM = frozenset({WaitingReason.SEQ_BUDGET, WaitingReason.KV_BLOCKS})
"""What others can give up: slots and blocks."""


class Isolation:
    """The outputs of the one request, and the rules by which the others give way."""

    def __init__(self, outputs: Iterable[Sequence], preemption: Preemption) -> None:
        self.outputs = tuple(outputs)
        self._members = frozenset(self.outputs)
        self._preemption = preemption

    def of(self, sequences: list[Sequence]) -> list[Sequence]:
        """Its own among `sequences`."""
        return [one for one in sequences if one in self._members]

    def admit(
        self,
        line: WaitingQueue,
        running: list[Sequence],
        plan: StepPlan,
        admit: Callable[[Sequence, StepPlan], WaitingReason | None],
        preempt: Callable[[Sequence, WaitingReason, StepPlan], None],
    ) -> None:
        """Take in its own that stand in `line`, at the cost of as many of the others as it takes.

        `admit` says why one cannot be taken in, or None; `preempt` changes `running`.
        """
        for sequence in self.outputs:
            if sequence not in line or sequence in plan.preempted:
                continue
            while reason := admit(sequence, plan):
                victim = self.victim(running) if reason in _ROOM and not plan.is_full else None
                if victim is None:
                    plan.skip(sequence, reason)
                    break
                preempt(victim, reason, plan)

    def victim(self, running: list[Sequence]) -> Sequence | None:
        """Who of the others loses slot and blocks next; None if none of them runs."""
        others = [one for one in running if one not in self._members]
        return next((one for one in reversed(others) if not one.is_pinned), others[-1] if others else None)

    def victim_for_blocks(self, running: list[Sequence]) -> Sequence | None:
        """One of the others; then of its own, as always."""
        return self.victim(running) or self._preemption.victim_for_blocks(self.of(running))
