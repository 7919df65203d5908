"""A sequence: one output of a request, with its tokens, KV blocks and status.

Invariants: every change of status goes through `Sequence._become`; `TRANSITIONS` lists the legal ones.
"""

from collections.abc import Iterable
from enum import Enum
from operator import attrgetter

from engine.constraints import FREE, Constraints
from engine.errors import IllegalTransition
from engine.sampling_params import SamplingParams


class SequenceStatus(Enum):
    #: Holds neither a slot nor blocks. A preempted or resumed sequence has output tokens already.
    WAITING = "waiting"
    #: Holds a slot, and blocks for all computed tokens.
    RUNNING = "running"
    #: Ended for `finish_reason`; holds nothing.
    FINISHED = "finished"


class FinishReason(Enum):
    #: An end-of-sequence token, a stop token or a stop string.
    STOP = "stop"
    #: `max_tokens`, `max_model_len` or the size of the KV pool.
    LENGTH = "length"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    ERROR = "error"


_WORST_FIRST = (
    FinishReason.ERROR,
    FinishReason.TIMEOUT,
    FinishReason.CANCELLED,
    FinishReason.LENGTH,
    FinishReason.STOP,
)


def worst_reason(reasons: Iterable[FinishReason]) -> FinishReason:
    """The reason of a request whose outputs ended for `reasons`."""
    return min(reasons, key=_WORST_FIRST.index)


TRANSITIONS: dict[SequenceStatus, frozenset[SequenceStatus]] = {
    SequenceStatus.WAITING: frozenset({SequenceStatus.RUNNING, SequenceStatus.FINISHED}),
    SequenceStatus.RUNNING: frozenset({SequenceStatus.WAITING, SequenceStatus.FINISHED}),
    SequenceStatus.FINISHED: frozenset(),
}


class Sequence:
    """One output of a request: `index` of `params.n`.

    Tokens. `token_ids`: the prompt, then the output. The keys and values of the first `num_computed_tokens`
    of them are computed, or being computed by a step that has not ended: `num_in_flight_tokens`.
    `num_cached_tokens`: prompt tokens found in the prefix cache at the first admission.
    `num_lost_tokens`: the largest number of computed tokens that one preemption discarded.

    Blocks. `block_table`: the KV blocks of the tokens, in order. `block_end`: number of tokens up to the end
    of the block that holds the newest one. `num_published_blocks`: blocks added to the prefix cache.
    `block_digests`: hashes of the full blocks. Only sequences of one `cache_salt` share cached blocks.
    `is_verified`: since the last admission, a row of finite logits was sampled. That row depends on all
    blocks of the sequence.
    `slot`: row in the runner's arrays while it runs. `is_pinned`: it holds blocks for all tokens that it may
    reach, and is not preempted.

    Order. `order`: sort key (priority, arrival time, request id, index); lower goes first. It outlives a
    preemption. `is_promoted`: it was admitted because it had waited for `max_waiting_seconds`.

    Times, in seconds on the scheduler's clock. `queued_at`: start of the wait; None: when it is added.
    `waiting_since`: start of the wait, moved by the time spent running. `waited_seconds`: length of the wait
    at the last admission. `scheduled_at`: decision on the step that first scheduled it, or None.
    """

    __slots__ = (
        "arrival_time", "block_digests", "block_end", "block_table", "cache_salt", "constraints",
        "finish_reason", "index", "is_pinned", "is_promoted", "is_verified", "num_cached_tokens",
        "num_computed_tokens", "num_in_flight_tokens", "num_lost_tokens", "num_preemptions",
        "num_prompt_tokens", "num_published_blocks", "order", "params", "priority", "queued_at",
        "request_id", "scheduled_at", "slot", "status", "token_ids", "waited_seconds", "waiting_since",
    )  # fmt: skip

    # One parameter for each attribute that is fixed when the sequence is created.
    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        arrival_time: float,
        index: int = 0,
        priority: int = 2,
        queued_at: float | None = None,
        cache_salt: bytes = b"",
        constraints: Constraints = FREE,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.queued_at = queued_at
        self.constraints = constraints
        self.params = params
        self.arrival_time = arrival_time
        self.priority = priority
        self.num_prompt_tokens = len(prompt_token_ids)
        self.token_ids = list(prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_in_flight_tokens = 0
        self.num_preemptions = 0
        self.num_lost_tokens = 0
        self.num_published_blocks = 0
        self.waiting_since = 0.0 if queued_at is None else queued_at
        self.waited_seconds = 0.0
        self.scheduled_at: float | None = None
        self.is_promoted = self.is_pinned = self.is_verified = False
        self.block_table: list[int] = []
        self.block_end = 0
        self.block_digests: list[bytes] = []
        self.cache_salt = cache_salt
        self.slot: int | None = None
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        # The request id and the index make the order total.
        self.order = (priority, arrival_time, request_id, index)

    @property
    def shares_blocks(self) -> bool:
        """Whether other outputs of the request use the same blocks for the prompt."""
        return self.params.n > 1

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the logits of all prompt rows are wanted, which ends with the first output token."""
        return self.params.prompt_logprobs is not None and len(self.token_ids) == self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens left to compute: the whole prompt at first, one when decoding."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_written_tokens(self) -> int:
        """Tokens whose keys and values were written by steps that have ended."""
        return self.num_computed_tokens - self.num_in_flight_tokens

    @property
    def is_decoding(self) -> bool:
        """Whether exactly one token, a sampled one, is left to compute."""
        num_tokens = len(self.token_ids)
        return num_tokens - self.num_computed_tokens == 1 and num_tokens > self.num_prompt_tokens

    @property
    def may_be_processed(self) -> bool:
        """Whether its logits may need penalties, bias or masks at some step."""
        params, constraints = self.params, self.constraints
        return bool(
            params.is_penalized
            or params.logit_bias
            or params.allowed_token_ids is not None
            or params.min_tokens
            or constraints.grammar is not None
            or constraints.bad_token_ids
        )

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def get_prompt_len(self) -> int:
        return self.num_prompt_tokens

    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)

    def start_waiting(self, now: float) -> None:
        """Count the wait from `queued_at`, or from `now` if that is not set."""
        if self.queued_at is None:
            self.queued_at = now
        self.waiting_since = self.queued_at

    def admit(
        self,
        slot: int,
        num_found_tokens: int = 0,
        *,
        now: float = 0.0,
        is_pinned: bool = False,
        is_promoted: bool = False,
    ) -> None:
        """Start running in `slot`. The first `num_found_tokens` are in the prefix cache."""
        self._become(SequenceStatus.RUNNING)
        self.slot = slot
        self.is_pinned = is_pinned
        self.is_promoted = is_promoted
        self.is_verified = False
        self.num_computed_tokens = num_found_tokens
        self.waited_seconds = now - self.waiting_since
        if self.scheduled_at is None:
            self.scheduled_at = now
        if not self.num_preemptions:
            self.num_cached_tokens = min(num_found_tokens, self.num_prompt_tokens)

    def preempt(self, now: float = 0.0) -> None:
        """Return to waiting. The tokens are kept and computed again. Time spent running does not count."""
        self._become(SequenceStatus.WAITING)
        self.slot = None
        self.is_pinned = self.is_promoted = False
        self.num_lost_tokens = max(self.num_lost_tokens, self.num_computed_tokens)
        self.num_computed_tokens = 0
        self.num_preemptions += 1
        self.waiting_since = now - self.waited_seconds

    def finish(self, reason: FinishReason) -> None:
        self._become(SequenceStatus.FINISHED)
        self.slot = None
        self.finish_reason = reason

    def _become(self, status: SequenceStatus) -> None:
        if status not in TRANSITIONS[self.status]:
            raise IllegalTransition(f"{self.request_id}: {self.status.value} -> {status.value}")
        self.status = status


ORDER = attrgetter("order")
"""Sort key of sequences; see `Sequence`."""
