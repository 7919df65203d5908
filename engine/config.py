"""The engine's configuration, validated when it is created."""

from dataclasses import dataclass

from engine.errors import InvalidParameter
from engine.validation import Boolean, Integer, Number, excerpt

POLICIES = ("fifo", "skip_ahead")
_REQUIRED_LIMITS = (
    "max_model_len",
    "num_kv_blocks",
    "block_size",
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_skip_ahead",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Limits and policies of the engine, in tokens, sequences, blocks and seconds.

    The defaults are for a CPU; `engine.execution.build` holds those that differ on CUDA.

    Limits. `max_model_len`: tokens of a prompt and its output. `num_kv_blocks`: usable blocks of `block_size`
    tokens. `max_num_batched_tokens`, `max_num_seqs`: tokens and sequences of one step.
    `max_num_prefill_seqs`: prefills in one step; None: 16, or 1 with chunked prefill off, as in the worked
    example of `docs/decisions.md`. `chunked_prefill`: if off, a prompt is computed in one step.
    `prefix_caching`: a prefix that was computed before is not computed again.

    Order of admission. `policy`: with "fifo" no sequence goes before the head of the queue, with "skip_ahead"
    a step tries up to `max_skip_ahead` sequences after a head that does not fit. A waiting sequence rises by
    one priority class per `ageing_seconds`, and to the top after `max_waiting_seconds`; None: never.

    Sharing of a step. `max_preemptions`: after that number a sequence is admitted only with blocks for its
    prompt and `max_tokens`, and is not preempted again. `prefill_reserve`: share of a step's tokens that
    decodes leave to prefills. `max_chunk_tokens`: tokens of one prompt in a step while other prompts can use
    the rest; None: half of `max_num_batched_tokens`.

    Speculative decoding. `num_speculative_tokens`: the most tokens that are drafted for a sequence in a step;
    0: none.
    """

    max_model_len: int
    num_kv_blocks: int
    block_size: int = 16
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    max_num_prefill_seqs: int | None = None
    chunked_prefill: bool = True
    prefix_caching: bool = True
    policy: str = "fifo"
    max_skip_ahead: int = 16
    ageing_seconds: float | None = 30.0
    max_waiting_seconds: float | None = 120.0
    max_preemptions: int = 3
    prefill_reserve: float = 0.0
    max_chunk_tokens: int | None = None
    num_speculative_tokens: int = 0

    def __post_init__(self) -> None:
        for field in _REQUIRED_LIMITS:
            Integer(minimum=1).check(field, getattr(self, field))
        for field in ("max_num_prefill_seqs", "max_chunk_tokens"):
            if getattr(self, field) is not None:
                Integer(minimum=1).check(field, getattr(self, field))
        for field in ("chunked_prefill", "prefix_caching"):
            Boolean().check(field, getattr(self, field))
        if self.max_model_len < 2:
            raise InvalidParameter("max_model_len", "must be at least 2: a prompt token and an output token")
        self._check_policies()

    @property
    def prefill_seqs_limit(self) -> int:
        """`max_num_prefill_seqs` or its default."""
        if self.max_num_prefill_seqs is None:
            return 16 if self.chunked_prefill else 1
        return self.max_num_prefill_seqs

    @property
    def chunk_tokens_limit(self) -> int:
        """`max_chunk_tokens` or its default."""
        if self.max_chunk_tokens is None:
            return max(1, self.max_num_batched_tokens // 2)
        return self.max_chunk_tokens

    @property
    def num_reserved_tokens(self) -> int:
        """`prefill_reserve` in tokens."""
        return int(self.prefill_reserve * self.max_num_batched_tokens)

    @property
    def kv_capacity(self) -> int:
        """Tokens that the KV pool holds."""
        return self.num_kv_blocks * self.block_size

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that can be served, which leaves room for one output token."""
        step_limit = self.max_model_len if self.chunked_prefill else self.max_num_batched_tokens
        return min(self.max_model_len - 1, self.kv_capacity, step_limit)

    def _check_policies(self) -> None:
        if self.policy not in POLICIES:
            raise InvalidParameter(
                "policy", f"must be one of {', '.join(POLICIES)}, not {excerpt(self.policy)}"
            )
        Integer(minimum=0).check("max_preemptions", self.max_preemptions)
        Integer(minimum=0).check("num_speculative_tokens", self.num_speculative_tokens)
        Number(minimum=0.0, maximum=0.9).check("prefill_reserve", self.prefill_reserve)
        for field in ("ageing_seconds", "max_waiting_seconds"):
            if getattr(self, field) is not None:
                Number(minimum=0.001, maximum=86400.0 * 366).check(field, getattr(self, field))
