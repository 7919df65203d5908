"""When a sequence ends by its tokens. Stop strings are a matter of text: see `engine/text/detokenizer.py`.

Law: none of the first `min_tokens` tokens ends an output, unless there is no room for more.
"""

from engine.config import EngineConfig
from engine.sequence import FinishReason, Sequence


class StopRules:
    """The ends that a token can bring: those that it was resolved to, its grammar's, and limits of length."""

    def __init__(self, config: EngineConfig) -> None:
        # A sequence that knows more tokens than the pool holds could not compute the last of them.
        self._max_num_tokens = min(config.max_model_len, config.kv_capacity + 1)

    def reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        """The end that `token_id` brings as the next of `sequence`; one that stops it leaves no text."""
        if token_id in sequence.constraints.end_token_ids and _may_end(sequence, sequence.num_output_tokens):
            return FinishReason.STOP
        return FinishReason.LENGTH if self.is_last(sequence) else None

    def is_last(self, sequence: Sequence) -> bool:
        """Whether there is no room for more than one token, whichever it is."""
        max_tokens, num_tokens = sequence.params.max_tokens, len(sequence.token_ids) + 1
        is_last = max_tokens is not None and num_tokens - sequence.num_prompt_tokens >= max_tokens
        return is_last or num_tokens >= self._max_num_tokens

    def completes_grammar(self, sequence: Sequence, token_id: int) -> bool:
        """Whether nothing but the end may follow `token_id`. Raises ValueError if the grammar forbids it."""
        grammar = sequence.constraints.grammar
        if grammar is None:
            return False
        grammar.advance([*sequence.output_token_ids, token_id])
        return grammar.is_complete and _may_end(sequence, sequence.num_output_tokens)

    def has_completed_grammar(self, sequence: Sequence) -> bool:
        """Whether a resumed output was at its grammar's end. Raises ValueError if it does not match."""
        grammar = sequence.constraints.grammar
        if grammar is None or not sequence.num_output_tokens:
            return False
        grammar.advance(sequence.output_token_ids)
        return grammar.is_complete and _may_end(sequence, sequence.num_output_tokens - 1)


def _may_end(sequence: Sequence, output_index: int) -> bool:
    """The sampler masks end tokens by the same rule, and so the text agrees with it."""
    return output_index >= sequence.params.min_tokens
