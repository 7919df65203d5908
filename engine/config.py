"""Every number that the scheduler obeys, checked when it is set."""

from dataclasses import dataclass

from engine.errors import InvalidParameter
from engine.validation import boolean, number, shown, whole

POLICIES = ("fifo", "skip_ahead")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """Limits of the engine, in tokens, sequences, blocks and seconds.

    The defaults are those of a CPU; `engine.execution.build` has the others of CUDA.

    `num_kv_blocks` counts the usable blocks of `block_size` tokens each. `max_model_len`: prompt and output
    of one sequence together. `chunked_prefill` off: a prompt is computed in one step or waits.
    `max_num_prefill_seqs`: sequences in one step that are not decoding; None: 16, or one prompt a step with
    chunked prefill off, as in the worked example of `docs/decisions.md`. `prefix_caching`: beginnings of
    prompts that are computed already are not computed again.

    Who goes first: `policy` "fifo" lets nobody past a waiting head that does not fit, "skip_ahead" tries up
    to `max_skip_ahead` others past it in a step. `fair_sharing`: of one priority, the tenant that was served
    the fewest tokens goes first. A waiting sequence counts as one priority class better for each
    `ageing_seconds` (None: never), and goes before all others after `max_waiting_seconds` (None: never);
    while several tenants wait, a tenant's next one has waited since the one before it was served.
    `max_preemptions`: one that lost its blocks or its slot so often comes back only with blocks for its
    prompt and `max_tokens`, and keeps them. `prefill_reserve`: the share of a step's tokens that decodes
    leave to prefills that can use it. `max_chunk_tokens`: the most that one prompt takes of a step while
    other prompts can use the rest (None: half of a step's tokens).
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
    fair_sharing: bool = True
    ageing_seconds: float | None = 30.0
    max_waiting_seconds: float | None = 120.0
    max_preemptions: int = 3
    prefill_reserve: float = 0.0
    max_chunk_tokens: int | None = None

    def __post_init__(self) -> None:
        limits = {
            "max_skip_ahead": self.max_skip_ahead,
            "max_model_len": self.max_model_len,
            "num_kv_blocks": self.num_kv_blocks,
            "block_size": self.block_size,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "max_num_prefill_seqs": self.max_num_prefill_seqs,
            "max_chunk_tokens": self.max_chunk_tokens,
        }
        for field, value in limits.items():
            if value is not None or field not in ("max_num_prefill_seqs", "max_chunk_tokens"):
                whole(field, value, least=1)
        for field in ("chunked_prefill", "prefix_caching", "fair_sharing"):
            boolean(field, getattr(self, field))
        if self.max_model_len < 2:
            raise InvalidParameter("max_model_len", "must hold a prompt token and an output token")
        self._check_policies()

    @property
    def prefill_seqs_limit(self) -> int:
        """`max_num_prefill_seqs`, or its default."""
        if self.max_num_prefill_seqs is None:
            return 16 if self.chunked_prefill else 1
        return self.max_num_prefill_seqs

    @property
    def chunk_tokens_limit(self) -> int:
        """`max_chunk_tokens`, or its default."""
        if self.max_chunk_tokens is None:
            return max(1, self.max_num_batched_tokens // 2)
        return self.max_chunk_tokens

    @property
    def num_reserved_tokens(self) -> int:
        """`prefill_reserve` in tokens of a step."""
        return int(self.prefill_reserve * self.max_num_batched_tokens)

    @property
    def kv_capacity(self) -> int:
        """Tokens that the whole KV pool holds."""
        return self.num_kv_blocks * self.block_size

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that can ever be served: one output token must have room too."""
        step = self.max_model_len if self.chunked_prefill else self.max_num_batched_tokens
        return min(self.max_model_len - 1, self.kv_capacity, step)

    def _check_policies(self) -> None:
        if self.policy not in POLICIES:
            raise InvalidParameter(
                "policy", f"must be one of {', '.join(POLICIES)}, not {shown(self.policy)}"
            )
        whole("max_preemptions", self.max_preemptions, least=0)
        number("prefill_reserve", self.prefill_reserve, 0.0, 0.9)
        for field in ("ageing_seconds", "max_waiting_seconds"):
            if getattr(self, field) is not None:
                number(field, getattr(self, field), 0.001, 86400.0 * 366)
