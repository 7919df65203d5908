"""How the tokens of a step are dealt out between one prefill and another.

Law: a long prompt leaves something to those after it, and nothing is left over that somebody could have used.
Knows no queue: who takes part is told.
"""

from engine.config import EngineConfig
from engine.scheduling.budget import SchedulingBudget
from engine.sequence import Sequence

MAX_PROMPT_LOGPROBS_ROWS = 256
"""The most rows of one prompt whose logits are wanted in one step: each is as wide as the vocabulary."""


class PrefillChunks:
    """The prefills of one step and the tokens that each gets.

    Each takes at most `chunk_tokens_limit` at first, so that a long prompt leaves something to those after
    it; what they leave in turn goes to the first. Each gets at least one while anything is left. With
    chunked prefill off only what has sampled before is computed in parts.
    """

    def __init__(self, config: EngineConfig, budget: SchedulingBudget) -> None:
        self._config = config
        self._budget = budget
        self._shares: dict[Sequence, int] = {}

    def __len__(self) -> int:
        return len(self._shares)

    def first_chunk(self, sequence: Sequence, num_computed_tokens: int) -> int:
        """What `sequence` would take now; more than the budget has left if that is nothing."""
        num_left = sequence.num_tokens - num_computed_tokens
        most = min(self._most(sequence), max(1, self._budget.remaining_tokens))
        if self._config.chunked_prefill:
            return min(num_left, most, self._config.chunk_tokens_limit)
        # What has sampled before may have grown past the budget, and would never be computed in one step.
        return min(num_left, most) if sequence.num_output_tokens else num_left

    def take(self, sequence: Sequence, num_new_tokens: int) -> None:
        """Raises ValueError when the budget has no room for it."""
        self._budget.add(num_new_tokens, 1, 1)
        self._shares[sequence] = num_new_tokens

    def distribute(self) -> dict[Sequence, int]:
        """Give what is left to the first who can use it. The tokens of each."""
        for sequence, num_new_tokens in self._shares.items():
            if not self._budget.remaining_tokens:
                break
            num_wanted = min(sequence.num_uncomputed_tokens, self._most(sequence)) - num_new_tokens
            num_more = min(num_wanted, self._budget.remaining_tokens)
            self._budget.add(num_more, 0)
            self._shares[sequence] += num_more
        return self._shares

    def _most(self, sequence: Sequence) -> int:
        if self._config.chunked_prefill and sequence.wants_prompt_logprobs:
            return MAX_PROMPT_LOGPROBS_ROWS
        return self._config.max_num_batched_tokens
