"""Whose blocks or slot another may take, and who is never asked again.

Law: the first in order is never a victim of a lack of blocks; one that lost too often comes back only with
blocks for all that it may ever know, and keeps them. So somebody always goes on, and nobody loses for ever.
Chooses; takes nothing away.
"""

from engine.config import EngineConfig
from engine.sequence import Sequence


class Preemption:
    """The rules by which running sequences give way. `running` is sorted by `Sequence.order`."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    def victim_for_blocks(self, running: list[Sequence]) -> Sequence | None:
        """The last in order that is not pinned; None if that leaves only the first."""
        return next((one for one in reversed(running) if not one.is_pinned and one is not running[0]), None)

    def victim_for_slot(self, running: list[Sequence], head: Sequence) -> Sequence | None:
        """The last in order, if `head` is of a strictly better priority of its own: equals never displace."""
        for one in reversed(running):
            if one.priority <= head.priority:
                return None
            if not (one.is_pinned or one.is_promoted):
                return one
        return None

    def leaves_room(self, head: Sequence, num_decoding: int, num_prefilling: int) -> bool:
        """Whether a step that goes on with so many others has the budget to begin with `head`."""
        config = self._config
        is_chunked = config.chunked_prefill or head.num_output_tokens > 0
        num_tokens = num_decoding + (1 if is_chunked else head.num_tokens)
        return num_prefilling < config.prefill_seqs_limit and num_tokens <= config.max_num_batched_tokens

    def is_to_be_pinned(self, sequence: Sequence) -> bool:
        return sequence.num_preemptions >= self._config.max_preemptions

    def num_tokens_to_hold(self, sequence: Sequence) -> int:
        """Tokens that need blocks before `sequence` is taken in: what it knows, or may ever know."""
        if not self.is_to_be_pinned(sequence):
            return sequence.num_tokens
        config, max_tokens = self._config, sequence.params.max_tokens
        most = min(config.max_model_len, config.kv_capacity)
        if max_tokens is not None:
            most = min(most, sequence.num_prompt_tokens + max_tokens)
        return max(most, sequence.num_tokens)
