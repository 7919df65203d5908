"""The distribution of a step's tokens among its prefills.

Invariants: a long prompt leaves tokens to those after it. No token is left over that a prefill could use.
"""

from engine.config import EngineConfig
from engine.scheduling.budget import SchedulingBudget
from engine.sequence import Sequence

MAX_PROMPT_LOGPROBS_ROWS = 256
"""Limit on the rows of one prompt per step whose logits are wanted. A row is as wide as the vocabulary."""


class PrefillChunks:
    """The prefills of one step, and the number of tokens of each.

    A prefill starts with at most `chunk_tokens_limit` tokens; `distribute` adds the remaining ones to the
    first prefills. With chunked prefill off, only a sequence that has sampled before is computed in chunks.
    """

    def __init__(self, config: EngineConfig, budget: SchedulingBudget) -> None:
        self._config = config
        self._budget = budget
        self._num_tokens: dict[Sequence, int] = {}

    def __len__(self) -> int:
        return len(self._num_tokens)

    def first_chunk(self, sequence: Sequence, num_computed_tokens: int) -> int:
        """The tokens that `sequence` starts with, at least one. May exceed the remaining budget."""
        num_left = sequence.num_tokens - num_computed_tokens
        limit = min(self._limit(sequence), max(1, self._budget.remaining_tokens))
        if self._config.chunked_prefill:
            return min(num_left, limit, self._config.chunk_tokens_limit)
        # A sequence that has sampled before may have grown past the budget, and would never fit as a whole.
        return min(num_left, limit) if sequence.num_output_tokens else num_left

    def add(self, sequence: Sequence, num_new_tokens: int) -> None:
        """Raises ValueError if the budget has no room."""
        self._budget.add(num_new_tokens, 1, 1)
        self._num_tokens[sequence] = num_new_tokens

    def distribute(self) -> dict[Sequence, int]:
        """Spend the remaining budget on the first prefills that can use it. Returns the tokens of each."""
        for sequence, num_new_tokens in self._num_tokens.items():
            if not self._budget.remaining_tokens:
                break
            num_wanted = min(sequence.num_uncomputed_tokens, self._limit(sequence)) - num_new_tokens
            num_more = min(num_wanted, self._budget.remaining_tokens)
            self._budget.add(num_more, 0)
            self._num_tokens[sequence] += num_more
        return self._num_tokens

    def _limit(self, sequence: Sequence) -> int:
        if self._config.chunked_prefill and sequence.wants_prompt_logprobs:
            return MAX_PROMPT_LOGPROBS_ROWS
        return self._config.max_num_batched_tokens
