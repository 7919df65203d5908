"""The frozen values of one step: what was decided, what came of it, what it cost.

Those of which a step makes one for each sequence are tuples: a third of a dataclass's time.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple

from engine.sequence import FinishReason, Sequence


class WaitingReason(Enum):
    """Why a waiting sequence was not taken into a step."""

    TOKEN_BUDGET = "token_budget"  # noqa: S105 - a budget of tokens, no secret
    SEQ_BUDGET = "seq_budget"
    PREFILL_BUDGET = "prefill_budget"
    KV_BLOCKS = "kv_blocks"
    #: The decodes of a step leave a share of its tokens to prefills.
    PREFILL_RESERVE = "prefill_reserve"
    #: A tenant that was served fewer tokens goes first.
    FAIR_SHARE = "fair_share"
    #: Its grammar is being compiled.
    GRAMMAR = "grammar"
    #: The first of its request's outputs is still computing the prompt that they share.
    SIBLING = "sibling"
    #: Others stand before it.
    BEHIND = "behind"


@dataclass(frozen=True, slots=True)
class ResumedOutput:
    """Tokens that an earlier engine generated for output `index`. With a `finish_reason` it has finished."""

    index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None


class ScheduledSequence(NamedTuple):
    """A sequence's share of one step: tokens `start` to `start + num_new_tokens` of it are computed.

    `logits_from`: the first of these rows (0 to `num_new_tokens`) whose logits are wanted;
    `num_new_tokens` means none. `samples`: the step reaches its last known token, so the next one is drawn.
    """

    sequence: Sequence
    start: int
    num_new_tokens: int
    logits_from: int
    samples: bool


class Skipped(NamedTuple):
    """Examined and passed over in this step."""

    sequence: Sequence
    reason: WaitingReason


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutputs:
    """The scheduler's whole decision on one step; the runner needs nothing else.

    `decode`: sequences with a gap of one that have sampled before; `prefill`: all others. `released_slots`:
    slots that lost their sequence since the last step. `blocks_to_zero`: blocks that held non-finite values.
    `num_prefix_queried_tokens`: known tokens of those admitted; `num_prefix_hit_tokens`: how many of these
    were found computed. `bound_by`: the limit that kept more from being scheduled, or None. `decided_at`: the
    time of the decision on the scheduler's clock.
    """

    decode: tuple[ScheduledSequence, ...] = ()
    prefill: tuple[ScheduledSequence, ...] = ()
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
        """In the order of the runner's rows: decodes, then prefills."""
        return self.decode + self.prefill

    @property
    def decode_sequences(self) -> list[Sequence]:
        return [item.sequence for item in self.decode]

    @property
    def prefill_sequences(self) -> list[Sequence]:
        return [item.sequence for item in self.prefill]

    def only(self, items: Iterable[ScheduledSequence], *, is_first: bool) -> "SchedulerOutputs":
        """The same decision for some of its sequences, for a step that is executed in parts.

        Only the part that is executed first tidies up: later, a block to zero may have been written again.
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
    """Natural logarithms of the model's own probabilities at one place of a text.

    `logprob` is that of `token_id`, which stands there; `top` are the likeliest ids with theirs, in order.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class SampledToken(NamedTuple):
    """What the sampler drew for one row: a token, or the reason why there is none."""

    token_id: int | None
    error: str | None = None
    logprobs: TokenLogprobs | None = None


class SequenceOutput(NamedTuple):
    """What a step gave one request; the last one of a request has a `finish_reason`.

    `index`: which of a request's n outputs. `token_id` is None when the end came without a token. `text` may
    be empty while an incomplete character or a possible stop string is held back; `held_text` is what of that
    the end sets free. `num_cached_tokens`: prompt tokens that were not computed again, told at the end.
    `logprobs` are those of `token_id`, where they were asked for. `prompt_logprobs` come with the first token
    of all outputs: one for each prompt token, None for the first.
    """

    request_id: str
    index: int = 0  # type: ignore[assignment]  # stands for a tuple's own method, which nobody needs here
    token_id: int | None = None
    text: str = ""
    held_text: str = ""
    finish_reason: FinishReason | None = None
    error: str | None = None
    num_cached_tokens: int = 0
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedSequence:
    """A request whose last output ended in this step: plain numbers.

    However many outputs it has, it counts once, and so does its prompt: `reason` is the worst of their ends
    (error, timeout, cancelled, length, stop), `num_output_tokens` and `num_preemptions` are sums. Seconds
    count from when it was accepted; None: never came.
    """

    reason: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_preemptions: int
    seconds: float
    first_token_seconds: float | None


class Waited(NamedTuple):
    """How long a request of a priority class waited for something."""

    priority: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What monitoring and the trace may know of one step: plain numbers, seconds, tokens.

    The `*_seconds` tuples hold one value for each event of this step: `queue_seconds` from arrival until the
    step that first scheduled the request was decided, `first_token_seconds` from arrival until the first
    token was on the host, `inter_token_seconds` between two tokens of one sequence. `total_seconds`: duration
    of the call of `Engine.step`. `seconds_since_decision`: from the decision on the reported step to the end
    of that call; with asynchronous scheduling the decision is made in an earlier call.
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
    finished: tuple[FinishedSequence, ...] = ()
    num_execution_faults: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What one step gave: tokens and ends, the requests that it started on, and its cost."""

    outputs: tuple[SequenceOutput, ...]
    started: tuple[str, ...]
    report: StepReport
