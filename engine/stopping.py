"""When a sequence ends by its tokens. Stop strings are a matter of text: see `engine/detokenizer.py`.

Law: none of the first `min_tokens` tokens ends an output, unless there is no room for more.
"""

from engine.config import EngineConfig
from engine.sequence import Sequence


class StopRules:
    """The ends that a token can bring: those that it was resolved to, its grammar's, and limits of length."""

    def __init__(self, config: EngineConfig) -> None:
        # A sequence that knows more tokens than the pool holds could not compute the last of them.
        self._max_num_tokens = min(config.max_model_len, config.kv_capacity + 1)

    def is_stop_token(self, sequence: Sequence, token_id: int) -> bool:
        """Whether `token_id`, as the next of `sequence`, ends the text; it leaves no text itself."""
        is_end = token_id in sequence.constraints.end_token_ids
        return is_end and _may_end(sequence, sequence.num_output_tokens)

    def completes_grammar(self, sequence: Sequence, token_id: int) -> bool:
        """Whether nothing but the end may follow `token_id`. Raises ValueError if the grammar forbids it."""
        grammar = sequence.constraints.grammar
        if grammar is None:
            return False
        grammar.advance([*sequence.output_token_ids, token_id])
        return grammar.is_complete and _may_end(sequence, sequence.num_output_tokens)

    def has_complete_grammar(self, sequence: Sequence) -> bool:
        """Whether a resumed output was at its grammar's end. Raises ValueError where it does not match."""
        grammar = sequence.constraints.grammar
        if grammar is None or not sequence.num_output_tokens:
            return False
        grammar.advance(sequence.output_token_ids)
        return grammar.is_complete and _may_end(sequence, sequence.num_output_tokens - 1)

    def has_room(self, sequence: Sequence) -> bool:
        """Whether `sequence` may grow beyond one more token."""
        max_tokens = sequence.params.max_tokens
        return sequence.num_tokens + 1 < self._max_num_tokens and (
            max_tokens is None or sequence.num_output_tokens + 1 < max_tokens
        )


def _may_end(sequence: Sequence, output_index: int) -> bool:
    """The sampler masks end tokens by the same rule, and so the text agrees with it."""
    return output_index >= sequence.params.min_tokens
