"""An isolated step: it computes the outputs of one request, and no other request.

Other requests keep their slots and blocks unless the isolated one needs them. Then the last running sequence
is preempted first, pinned ones after all others. Any request fits into an empty engine, so an isolated step
always makes progress.
"""

from collections.abc import Iterable

from engine.outputs import WaitingReason
from engine.scheduling.admission import Admission
from engine.scheduling.state import SchedulerState
from engine.scheduling.step_plan import StepPlan
from engine.sequence import Sequence

_PREEMPTION_HELPS = frozenset({WaitingReason.SEQ_BUDGET, WaitingReason.KV_BLOCKS})


class Isolation:
    """Selects the outputs of one request, and preempts other requests for them."""

    def __init__(self, sequences: Iterable[Sequence], state: SchedulerState, admission: Admission) -> None:
        self._sequences = tuple(sequences)
        self._members = frozenset(self._sequences)
        self._state = state
        self._admission = admission

    def select(self, sequences: list[Sequence]) -> list[Sequence]:
        """Those of `sequences` that belong to the isolated request."""
        return [one for one in sequences if one in self._members]

    def admit_waiting(self, plan: StepPlan) -> None:
        """Admit the queued outputs, each of them before other requests."""
        for sequence in self._sequences:
            if sequence in self._state.waiting.queue and sequence not in plan.preempted:
                self._admit(sequence, plan)

    def victim_for_blocks(self, running: list[Sequence]) -> Sequence | None:
        """A sequence of another request; if none runs, one of its own by the common policy."""
        return self._other_victim(running) or self._state.preemption.victim_for_blocks(self.select(running))

    def _admit(self, sequence: Sequence, plan: StepPlan) -> None:
        """Admit `sequence`, and preempt other requests until it fits."""
        while reason := self._admission.admit(sequence, plan):
            helps = reason in _PREEMPTION_HELPS and not plan.is_full
            victim = self._other_victim(self._state.running.queue) if helps else None
            if victim is None:
                plan.skip(sequence, reason)
                return
            self._state.preempt(victim, reason, plan)

    def _other_victim(self, running: list[Sequence]) -> Sequence | None:
        """The next sequence of another request to preempt; None if none runs."""
        others = [one for one in running if one not in self._members]
        return next((one for one in reversed(others) if not one.is_pinned), others[-1] if others else None)
