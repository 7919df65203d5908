"""The immutable values of one step: its decision, its results and its report.

Values that a step creates for each sequence are named tuples, which take a third of a dataclass's time.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from engine.sequence import FinishReason, Sequence


class WaitingReason(Enum):
    """Why a step did not admit a waiting sequence."""

    TOKEN_BUDGET = "token_budget"  # noqa: S105 - a budget of tokens, no secret
    SEQ_BUDGET = "seq_budget"
    PREFILL_BUDGET = "prefill_budget"
    KV_BLOCKS = "kv_blocks"
    #: Decodes leave a share of the step's tokens to prefills.
    PREFILL_RESERVE = "prefill_reserve"
    #: Its grammar is being compiled.
    GRAMMAR = "grammar"
    #: The first output of its request is still computing the prompt that they share.
    SIBLING = "sibling"
    #: The step examined only sequences before it in the queue.
    BEHIND = "behind"


@dataclass(frozen=True, slots=True)
class ResumedOutput:
    """Tokens that an earlier engine generated for output `index`. With a `finish_reason` it has finished."""

    index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None


class ScheduledSequence(NamedTuple):
    """A sequence in a step: the tokens from `start` to `start + num_new_tokens` (exclusive) are computed.

    `logits_from`: the first of these rows, from 0, whose logits are wanted; `num_new_tokens` if none is.
    `samples`: the step computes the last known token, and samples the next one.
    """

    sequence: Sequence
    start: int
    num_new_tokens: int
    logits_from: int
    samples: bool

    @property
    def output_index(self) -> int:
        """The index in the output of the token that it samples."""
        return self.start + self.num_new_tokens - self.sequence.num_prompt_tokens


class Skipped(NamedTuple):
    """A sequence that the step examined and did not schedule."""

    sequence: Sequence
    reason: WaitingReason


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutputs:
    """The decision on one step.

    `decode`: sequences that compute one token and have sampled before; `prefill`: all others.
    `drafts`: the tokens drafted for some of the decoding sequences. Each drafted token is an item of its own,
    after that of its sequence: a decode that samples the token after the draft.
    `released_slots`: slots that lost their sequence since the last step. `blocks_to_zero`: blocks that may
    hold non-finite values. `num_prefix_queried_tokens`: known tokens of the admitted sequences;
    `num_prefix_hit_tokens`: those of them found in the prefix cache. `bound_by`: the first limit that kept a
    sequence out, or None. `decided_at`: time of the decision, in seconds on the scheduler's clock.
    """

    decode: tuple[ScheduledSequence, ...] = ()
    prefill: tuple[ScheduledSequence, ...] = ()
    drafts: Mapping[Sequence, tuple[int, ...]] = field(default_factory=dict)
    preempted: tuple[Sequence, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    released_slots: tuple[int, ...] = ()
    blocks_to_zero: tuple[int, ...] = ()
    num_batched_tokens: int = 0
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    bound_by: WaitingReason | None = None
    decided_at: float = 0.0

    @property
    def scheduled(self) -> tuple[ScheduledSequence, ...]:
        """Decodes, then prefills: the order of the runner's rows."""
        return self.decode + self.prefill

    @property
    def decode_sequences(self) -> list[Sequence]:
        return [item.sequence for item in self.decode]

    @property
    def prefill_sequences(self) -> list[Sequence]:
        return [item.sequence for item in self.prefill]

    def without_drafts(self) -> "SchedulerOutputs":
        """The same decision, without the drafted tokens and their items."""
        first_items = {item.sequence: item for item in reversed(self.decode)}
        return replace(self, decode=tuple(reversed(first_items.values())), drafts={})

    def subset(self, items: Iterable[ScheduledSequence], *, is_first: bool) -> "SchedulerOutputs":
        """The decision on some of its sequences, for a step that is executed in parts.

        Only the first part zeroes blocks and releases slots: later, such a block may have been written again.
        """
        kept = set(map(id, items))
        return replace(
            self,
            released_slots=self.released_slots if is_first else (),
            blocks_to_zero=self.blocks_to_zero if is_first else (),
            decode=tuple(item for item in self.decode if id(item) in kept),
            prefill=tuple(item for item in self.prefill if id(item) in kept),
        )


class TokenLogprobs(NamedTuple):
    """Natural logarithms of the model's probabilities at one position.

    `logprob`: of the chosen `token_id`. `top`: the likeliest token ids and their log-probabilities, in
    descending order.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class SampledToken(NamedTuple):
    """The result of sampling one row: a token, or an error if `token_id` is None."""

    token_id: int | None
    error: str | None = None
    logprobs: TokenLogprobs | None = None


class SequenceOutput(NamedTuple):
    """The result of a step for output `index` of one request. The last one has a `finish_reason`.

    `token_id`: None if the output ends without a new token. `text`: may be empty while an incomplete
    character or a possible stop string is held back; `held_text`: held-back text that the end releases.
    `num_cached_tokens`: prompt tokens found in the prefix cache, set at the end. `logprobs`: of `token_id`,
    if requested. `prompt_logprobs`: one per prompt token, None for the first; set with the first token of the
    request.
    """

    request_id: str
    index: int = 0  # type: ignore[assignment]  # replaces tuple.index
    token_id: int | None = None
    text: str = ""
    held_text: str = ""
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRequest:
    """A request whose last output finished in this step.

    A request and its prompt count once: `reason` is the worst one of its outputs (error, timeout, cancelled,
    length, stop), `num_output_tokens` and `num_preemptions` are sums. Seconds count from its acceptance;
    `first_token_seconds` is None without a token.
    """

    reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    seconds: float
    first_token_seconds: float | None


class Waited(NamedTuple):
    """How long a request of a priority class waited, in seconds."""

    priority: int
    seconds: float


class Lane(NamedTuple):
    """One sequence in one step.

    `state`: `prefill` or `decode` if the step computed `num_tokens` of it, else `waiting`, or `preempted` if
    it waits after it lost its KV blocks. `reason`: what kept it out of the step.
    """

    request_id: str
    output_index: int
    state: str
    num_tokens: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Statistics of one step, for metrics and traces.

    The `*_seconds` tuples hold one value per event in this step: `queue_seconds` from acceptance to the
    decision that first scheduled the request, `first_token_seconds` from acceptance to the first token on the
    host, `inter_token_seconds` between two tokens of one sequence. `total_seconds`: duration of the call of
    `Engine.step`. `seconds_since_decision`: from the decision on the reported step to the end of that call;
    with asynchronous scheduling an earlier call makes the decision. `lanes`: None unless
    `Engine.records_lanes` is set.
    """

    step: int
    schedule_seconds: float = 0.0
    execute_seconds: float = 0.0
    sample_seconds: float = 0.0
    detokenize_seconds: float = 0.0
    update_seconds: float = 0.0
    total_seconds: float = 0.0
    seconds_since_decision: float = 0.0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    num_prefill_seqs: int = 0
    num_decode_seqs: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    max_num_batched_tokens: int = 0
    max_num_seqs: int = 0
    max_num_prefill_seqs: int = 0
    bound_by: str | None = None
    num_running: int = 0
    num_waiting: int = 0
    waiting_reasons: tuple[tuple[str, int], ...] = ()
    num_preempted: int = 0
    num_recomputed_tokens: int = 0
    num_kv_blocks: int = 0
    num_free_kv_blocks: int = 0
    num_cached_kv_blocks: int = 0
    num_prefix_queried_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_generated_tokens: int = 0
    queue_seconds: tuple[Waited, ...] = ()
    first_token_seconds: tuple[Waited, ...] = ()
    inter_token_seconds: tuple[float, ...] = ()
    finished: tuple[FinishedRequest, ...] = ()
    num_execution_faults: int = 0
    lanes: tuple[Lane, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """The results of one step: outputs, ids of requests that were first scheduled, and the report."""

    outputs: tuple[SequenceOutput, ...]
    started: tuple[str, ...]
    report: StepReport
