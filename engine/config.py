"""Every number that the scheduler obeys, checked when it is set."""

from dataclasses import dataclass

from engine.errors import InvalidParameter


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Limits of the engine. Tokens, sequences and blocks; no seconds.

    `num_kv_blocks` counts the usable blocks of `block_size` tokens each. `max_model_len`: prompt and output
    of one sequence together. `chunked_prefill` off: a prompt is computed in one step or waits.
    `max_num_prefill_seqs`: sequences in one step that are not decoding; None: 16, or one prompt a step with
    chunked prefill off, as in the worked example of `docs/decisions.md`. `prefix_caching`: beginnings of
    prompts that are computed already are not computed again.
    """

    max_model_len: int
    num_kv_blocks: int
    block_size: int = 16
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_num_prefill_seqs: int | None = None
    chunked_prefill: bool = True
    prefix_caching: bool = True

    def __post_init__(self) -> None:
        limits = {
            "max_model_len": self.max_model_len,
            "num_kv_blocks": self.num_kv_blocks,
            "block_size": self.block_size,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "max_num_prefill_seqs": self.prefill_seqs_limit,
        }
        for field, value in limits.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidParameter(field, f"must be a whole number of at least 1, not {value!r}")
        if self.max_model_len < 2:
            raise InvalidParameter("max_model_len", "must hold a prompt token and an output token")

    @property
    def prefill_seqs_limit(self) -> int:
        """`max_num_prefill_seqs`, or its default."""
        if self.max_num_prefill_seqs is None:
            return 16 if self.chunked_prefill else 1
        return self.max_num_prefill_seqs

    @property
    def kv_capacity(self) -> int:
        """Tokens that the whole KV pool holds."""
        return self.num_kv_blocks * self.block_size

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that can ever be served: one output token must have room too."""
        step = self.max_model_len if self.chunked_prefill else self.max_num_batched_tokens
        return min(self.max_model_len - 1, self.kv_capacity, step)
