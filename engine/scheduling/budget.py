"""The budget of one step: what it may schedule, what it has scheduled, and which limit was reached first."""

from engine.config import EngineConfig
from engine.outputs import WaitingReason


class SchedulingBudget:
    """Tokens, sequences and prefills of one step. A limit of zero is zero, not "no limit".

    `bound_by`: the first limit that was exceeded, or None.
    """

    __slots__ = (
        "bound_by", "max_num_batched_tokens", "max_num_prefill_seqs", "max_num_seqs", "num_batched_tokens",
        "num_prefill_seqs", "num_seqs",
    )  # fmt: skip

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int, max_num_prefill_seqs: int) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.max_num_prefill_seqs = max_num_prefill_seqs
        self.num_batched_tokens = 0
        self.num_seqs = 0
        self.num_prefill_seqs = 0
        self.bound_by: WaitingReason | None = None

    @classmethod
    def of(cls, config: EngineConfig) -> "SchedulingBudget":
        return cls(config.max_num_batched_tokens, config.max_num_seqs, config.prefill_seqs_limit)

    @property
    def remaining_tokens(self) -> int:
        return self.max_num_batched_tokens - self.num_batched_tokens

    def exceeded_limit(
        self, num_new_tokens: int, num_new_seqs: int, num_new_prefill_seqs: int = 0
    ) -> WaitingReason | None:
        """The limit that this addition would exceed, or None if it fits."""
        if self.num_seqs + num_new_seqs > self.max_num_seqs:
            return self._bound(WaitingReason.SEQ_BUDGET)
        if self.num_prefill_seqs + num_new_prefill_seqs > self.max_num_prefill_seqs:
            return self._bound(WaitingReason.PREFILL_BUDGET)
        if num_new_tokens > self.remaining_tokens:
            return self._bound(WaitingReason.TOKEN_BUDGET)
        return None

    def can_schedule(self, num_new_tokens: int, num_new_seqs: int, num_new_prefill_seqs: int = 0) -> bool:
        return self.exceeded_limit(num_new_tokens, num_new_seqs, num_new_prefill_seqs) is None

    def add(self, num_new_tokens: int, num_new_seqs: int, num_new_prefill_seqs: int = 0) -> None:
        """Raises ValueError, and adds nothing, if it does not fit."""
        if reason := self.exceeded_limit(num_new_tokens, num_new_seqs, num_new_prefill_seqs):
            raise ValueError(f"over the step's budget: {reason.value}")
        self.num_batched_tokens += num_new_tokens
        self.num_seqs += num_new_seqs
        self.num_prefill_seqs += num_new_prefill_seqs

    def _bound(self, reason: WaitingReason) -> WaitingReason:
        self.bound_by = self.bound_by or reason
        return reason
