"""Chooses the running sequence that loses its blocks or its slot, and the sequences that are pinned.

`SchedulerState.preempt` carries out a preemption and requeues the victim.

Invariants: the first running sequence never loses its blocks. A sequence that was preempted
`max_preemptions` times is admitted only with blocks for all tokens that it may reach, and keeps them. So each
step makes progress, and the number of preemptions of a sequence is bounded.
"""

from engine.config import EngineConfig
from engine.sequence import Sequence


class PreemptionPolicy:
    """Chooses victims. `running` is sorted by `Sequence.order`."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    def victim_for_blocks(self, running: list[Sequence]) -> Sequence | None:
        """The last sequence that is neither pinned nor the first; None if there is none."""
        return next((one for one in reversed(running) if not one.is_pinned and one is not running[0]), None)

    def victim_for_slot(self, running: list[Sequence], head: Sequence) -> Sequence | None:
        """The last sequence whose priority is strictly lower than that of `head`; ageing does not count.

        None if there is none, or if all of them are pinned or promoted.
        """
        for one in reversed(running):
            if one.priority <= head.priority:
                return None
            if not (one.is_pinned or one.is_promoted):
                return one
        return None

    def leaves_budget(self, head: Sequence, num_decoding: int, num_prefilling: int) -> bool:
        """Whether the budget of a step admits `head` beside the given numbers of running sequences."""
        config = self._config
        is_chunked = config.chunked_prefill or head.num_output_tokens > 0
        num_tokens = num_decoding + (1 if is_chunked else head.num_tokens)
        return num_prefilling < config.prefill_seqs_limit and num_tokens <= config.max_num_batched_tokens

    def must_pin(self, sequence: Sequence) -> bool:
        return sequence.num_preemptions >= self._config.max_preemptions

    def num_tokens_to_reserve(self, sequence: Sequence) -> int:
        """Tokens that need blocks at admission: the known ones, or all that a pinned sequence may reach."""
        if not self.must_pin(sequence):
            return sequence.num_tokens
        config, max_tokens = self._config, sequence.params.max_tokens
        limit = min(config.max_model_len, config.kv_capacity)
        if max_tokens is not None:
            limit = min(limit, sequence.num_prompt_tokens + max_tokens)
        return max(limit, sequence.num_tokens)
