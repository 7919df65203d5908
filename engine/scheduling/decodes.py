"""The decodes of a step: one token for each running sequence that has sampled before."""

from engine.outputs import ScheduledSequence, WaitingReason
from engine.scheduling.decode_rotation import DecodeRotation
from engine.scheduling.state import SchedulerState
from engine.scheduling.step_plan import StepPlan
from engine.sequence import Sequence, SequenceStatus

# Skips the constructor of a named tuple, which is 10 % of a step's cost (`benchmarks/scheduler.py`).
_new_tuple = tuple.__new__


class DecodeScheduler:
    """Schedules decodes, and allocates the blocks that they need."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._blocks = state.block_manager
        self._rotation = DecodeRotation(state.config)

    def could_preempt(self, decoding: list[Sequence]) -> bool:
        """Whether `decoding` may need more blocks than are free."""
        num_needed = sum(one.num_computed_tokens == one.block_end for one in decoding)
        return num_needed > self._blocks.num_free_blocks

    def schedule(self, decoding: list[Sequence], prefilling: list[Sequence], plan: StepPlan) -> None:
        chosen, passed_over, reason = self._rotation.choose(
            decoding, lambda: self._num_prefill_tokens(prefilling)
        )
        scheduled = plan.decode
        for sequence in chosen:
            start = sequence.num_computed_tokens
            if start == sequence.block_end and not self._allocate_block(sequence, plan):
                continue
            sequence.num_computed_tokens = start + 1
            scheduled.append(_new_tuple(ScheduledSequence, (sequence, start, 1, 0, True)))
        plan.budget.add(len(scheduled), len(scheduled))
        for sequence in passed_over:
            plan.skip(sequence, reason)

    def _allocate_block(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Allocate the block of the next token. Returns False if the sequence was preempted, or no block is
        available.
        """
        if sequence.status is not SequenceStatus.RUNNING:
            return False  # Preempted for a sequence before it.
        self._blocks.publish(sequence)
        return self._blocks.allocate_next(sequence) or self._preempt_and_allocate(sequence, plan)

    def _preempt_and_allocate(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Allocate the block of the next token after preempting the last sequences, which may include
        `sequence` itself.

        The first sequence is never preempted. It fits into the pool alone, since a sequence ends before it
        outgrows the pool. While all others are pinned it is skipped: they need no more blocks, and will end.
        """
        plan.lacks_blocks = True
        victim = plan.victims.victim_for_blocks(self._state.running.queue)
        if victim is None:
            plan.skip(sequence, WaitingReason.KV_BLOCKS)
            return False
        self._state.preempt(victim, WaitingReason.KV_BLOCKS, plan)
        if victim is sequence:
            return False
        return self._blocks.allocate_next(sequence) or self._preempt_and_allocate(sequence, plan)

    def _num_prefill_tokens(self, prefilling: list[Sequence]) -> int:
        """Tokens that prefills could use in this step: those under way, and the head of the queue if it could
        be admitted.
        """
        num_tokens = sum(sequence.num_uncomputed_tokens for sequence in prefilling)
        head, config = self._state.waiting.queue.head, self._state.config
        has_room = self._state.running.has_free_slot and len(prefilling) < config.prefill_seqs_limit
        if head is None or not has_room:
            return num_tokens
        if not config.chunked_prefill and head.num_tokens > config.num_reserved_tokens:
            return num_tokens
        num_blocks = self._blocks.num_blocks_of(self._state.preemption.num_tokens_to_reserve(head))
        num_missing = num_blocks - len(self._blocks.find_prefix(head))
        return num_tokens + (head.num_tokens if num_missing <= self._blocks.num_free_blocks else 0)
