"""Admission: which waiting sequences start running in a step, and which requests are rejected at once.

`EngineConfig.policy` decides whether a smaller sequence may go before a waiting one that does not fit.
"""

from engine.config import EngineConfig
from engine.errors import NeverFits
from engine.outputs import WaitingReason
from engine.scheduling.slot_preemption import SlotPreemption
from engine.scheduling.state import SchedulerState
from engine.scheduling.step_plan import StepPlan
from engine.sequence import Sequence

_SMALLER_MAY_FIT = frozenset({WaitingReason.KV_BLOCKS, WaitingReason.TOKEN_BUDGET})
"""Limits that a smaller sequence may not exceed. The limit on sequences is not one of them."""


def check_prompt_length(config: EngineConfig, sequence: Sequence) -> None:
    """Raises `NeverFits` if no step could ever admit `sequence`."""
    prompt_len = sequence.get_prompt_len()
    if prompt_len >= config.max_model_len:
        limit = f"the model takes at most {config.max_model_len - 1} and one output token"
    elif prompt_len > config.kv_capacity:
        limit = f"the KV cache holds {config.kv_capacity}"
    elif prompt_len > config.max_prompt_tokens and not sequence.num_output_tokens:
        limit = f"without chunked prefill a step takes at most {config.max_num_batched_tokens}"
    else:
        return
    raise NeverFits("prompt", f"has {prompt_len} tokens; {limit}")


class Admission:
    """Admits waiting sequences in order. With the policy "skip_ahead", a step tries up to
    `max_skip_ahead` sequences after the first that does not fit; a promoted sequence is not skipped.
    """

    def __init__(self, state: SchedulerState, slots: SlotPreemption) -> None:
        config = state.config
        self._state = state
        self._slots = slots
        self._queue = state.waiting.queue
        self._max_skip_ahead = config.max_skip_ahead if config.policy == "skip_ahead" else 0

    def admit_waiting(self, plan: StepPlan) -> None:
        """Admit waiting sequences while slots, blocks and the budget suffice."""
        skipped, num_tried = list[Sequence](), 0
        while num_tried <= self._max_skip_ahead and (sequence := self._slots.next_sequence()) is not None:
            if reason := self.admit(sequence, plan):
                if sequence not in plan.preempted:
                    plan.skip(sequence, reason)
                if not self._may_skip(sequence, reason, plan):
                    break
                self._queue.remove(sequence)
                skipped.append(sequence)
            num_tried += bool(skipped)
        for sequence in skipped:
            self._queue.add(sequence)

    def admit(self, sequence: Sequence, plan: StepPlan) -> WaitingReason | None:
        """Move a queued sequence to a slot, allocate its blocks and add its first chunk to the plan.

        Returns None, or the limit that prevents it; then nothing has changed.
        """
        state = self._state
        if plan.lacks_blocks:
            return WaitingReason.KV_BLOCKS
        if not state.running.has_free_slot:
            return WaitingReason.SEQ_BUDGET
        if reason := plan.budget.exceeded_limit(1, 1, 1):
            return reason
        prefix = state.block_manager.find_prefix(sequence)
        num_found_tokens = len(prefix) * state.config.block_size
        num_new_tokens = plan.prefills.first_chunk(sequence, num_found_tokens)
        if reason := plan.budget.exceeded_limit(num_new_tokens, 1, 1):
            return reason
        if not state.block_manager.allocate(
            sequence, prefix, state.preemption.num_tokens_to_reserve(sequence)
        ):
            return WaitingReason.KV_BLOCKS
        state.admit(sequence, num_found_tokens, plan)
        self._slots.end_claim(sequence)
        plan.prefills.add(sequence, num_new_tokens)
        return None

    def _may_skip(self, sequence: Sequence, reason: WaitingReason, plan: StepPlan) -> bool:
        """Whether another sequence may be tried before `sequence`, which `reason` keeps waiting."""
        return (
            self._max_skip_ahead > 0
            and reason in _SMALLER_MAY_FIT
            and not plan.is_full
            and self._slots.may_be_skipped(sequence)
        )
