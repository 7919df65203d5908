"""When a sequence ends by its tokens. Stop strings are a matter of text: see `engine/detokenizer.py`."""

from engine.config import EngineConfig
from engine.sequence import FinishReason, Sequence


class StopRules:
    """The ends that a token can bring: the model's own, the request's, and the limits of length."""

    def __init__(self, config: EngineConfig, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids
        # A sequence that knows more tokens than the pool holds could not compute the last of them.
        self._max_num_tokens = min(config.max_model_len, config.kv_capacity + 1)

    def is_stop_token(self, sequence: Sequence, token_id: int) -> bool:
        """Whether `token_id` ends the text; it leaves no text itself."""
        params = sequence.params
        is_eos = token_id in self._eos_token_ids and not params.ignore_eos
        return is_eos or token_id in params.stop_token_ids

    def is_full(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether `sequence` may not grow beyond `num_tokens` known tokens."""
        max_tokens = sequence.params.max_tokens
        num_output_tokens = num_tokens - sequence.num_prompt_tokens
        return num_tokens >= self._max_num_tokens or (
            max_tokens is not None and num_output_tokens >= max_tokens
        )

    def reason(self, sequence: Sequence, token_id: int) -> FinishReason | None:
        """The end that `token_id` brings when it is appended to `sequence`."""
        if self.is_stop_token(sequence, token_id):
            return FinishReason.STOP
        if self.is_full(sequence, sequence.num_tokens + 1):
            return FinishReason.LENGTH
        return None
