"""Decides when a token finishes a sequence. For stop strings see `engine/text/detokenizer.py`.

Invariants: none of the first `min_tokens` tokens finishes an output, except by the limit on its length.
"""

from engine.config import EngineConfig
from engine.sequence import FinishReason, Sequence


class StopRules:
    """Checks end tokens, completed grammars and limits on length."""

    def __init__(self, config: EngineConfig) -> None:
        # The last known token need not be in the KV cache, hence one more than its capacity.
        self._max_num_tokens = min(config.max_model_len, config.kv_capacity + 1)

    def reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        """Why `token_id`, the next token, finishes `sequence`; None if it does not.

        A token that finishes it with STOP adds no text.
        """
        if token_id in sequence.constraints.end_token_ids and _may_end(sequence, sequence.num_output_tokens):
            return FinishReason.STOP
        return FinishReason.LENGTH if self.is_last(sequence) else None

    def is_last(self, sequence: Sequence) -> bool:
        """Whether any next token reaches the limit on length."""
        max_tokens, num_tokens = sequence.params.max_tokens, len(sequence.token_ids) + 1
        is_last = max_tokens is not None and num_tokens - sequence.num_prompt_tokens >= max_tokens
        return is_last or num_tokens >= self._max_num_tokens

    def completes_grammar(self, sequence: Sequence, token_id: int) -> bool:
        """Whether `token_id` completes the grammar. Raises `ValueError` if the grammar forbids it."""
        grammar = sequence.constraints.grammar
        if grammar is None:
            return False
        grammar.advance([*sequence.output_token_ids, token_id])
        return grammar.is_complete and _may_end(sequence, sequence.num_output_tokens)

    def has_completed_grammar(self, sequence: Sequence) -> bool:
        """Whether a resumed output has completed its grammar. Raises `ValueError` if it does not match."""
        grammar = sequence.constraints.grammar
        if grammar is None or not sequence.num_output_tokens:
            return False
        grammar.advance(sequence.output_token_ids)
        return grammar.is_complete and _may_end(sequence, sequence.num_output_tokens - 1)


def _may_end(sequence: Sequence, output_index: int) -> bool:
    """The sampler masks end tokens by the same rule."""
    return output_index >= sequence.params.min_tokens
