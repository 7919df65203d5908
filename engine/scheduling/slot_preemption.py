"""Preemption for a slot: when all slots are taken, the head of the queue may claim one.

Invariants: the victim's own priority is strictly lower, and the head fits once the victim is preempted. Until
the head is admitted, only a promoted sequence may go before it.
"""

from engine.outputs import WaitingReason
from engine.scheduling.running import split_by_phase
from engine.scheduling.state import SchedulerState
from engine.scheduling.step_plan import StepPlan
from engine.sequence import Sequence


class SlotPreemption:
    """Keeps at most one claimant: the waiting sequence for which another lost its slot."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._queue = state.waiting.queue
        self._claimant: Sequence | None = None

    def is_possible(self) -> bool:
        """Whether all slots are taken, and a waiting sequence has a better priority than the last running
        one.
        """
        running, queue = self._state.running, self._queue
        return bool(not running.has_free_slot and queue and queue.best_priority < running.queue[-1].priority)

    def preempt_for_head(self, plan: StepPlan) -> None:
        """Preempt a running sequence for the head of the queue, if the rules allow it."""
        if not self.is_possible() or self._queue.is_head_promoted:
            return
        head = self._queue.head
        assert head is not None
        victim = self._state.preemption.victim_for_slot(self._state.running.queue, head)
        if victim is not None and self._fits_without(victim, head):
            self._claimant = head
            self._state.preempt(victim, WaitingReason.SEQ_BUDGET, plan)

    def next_sequence(self) -> Sequence | None:
        """The next sequence to admit: the claimant unless the head is promoted, else the head."""
        if self._claimant is None or self._queue.is_head_promoted:
            return self._queue.head
        return self._claimant

    def may_be_skipped(self, sequence: Sequence) -> bool:
        """Whether others may be admitted before `sequence`: it is not the claimant, and none is promoted."""
        return sequence is not self._claimant and not self._queue.is_head_promoted

    def end_claim(self, sequence: Sequence) -> None:
        """`sequence` was admitted or has ended: if it is the claimant, its claim ends."""
        if sequence is self._claimant:
            self._claimant = None

    def _fits_without(self, victim: Sequence, head: Sequence) -> bool:
        """Whether this step could admit `head` if `victim` held nothing."""
        policy, blocks = self._state.preemption, self._state.block_manager
        others = [one for one in self._state.running.queue if one is not victim]
        decoding, prefilling = split_by_phase(others)
        return policy.leaves_budget(head, len(decoding), len(prefilling)) and blocks.can_allocate(
            policy.num_tokens_to_reserve(head), blocks.find_prefix(head), without=victim
        )
