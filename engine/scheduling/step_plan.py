"""The decision on one step while it is being made."""

from typing import Protocol

from engine.config import EngineConfig
from engine.outputs import ScheduledSequence, SchedulerOutputs, Skipped, WaitingReason
from engine.scheduling.budget import SchedulingBudget
from engine.scheduling.prefill_chunks import PrefillChunks
from engine.sequence import Sequence, SequenceStatus


class VictimPolicy(Protocol):
    """Chooses the sequence that loses its blocks. `running` is sorted by `Sequence.order`."""

    def victim_for_blocks(self, running: list[Sequence]) -> Sequence | None: ...


class StepPlan:
    """The scheduled and skipped sequences of a step, its budget, and its victim policy.

    `drafts`: see `SchedulerOutputs`. `lacks_blocks`: a running sequence lost its blocks, or could not
    allocate one. `now`: the time of the decision, in seconds on the scheduler's clock.
    """

    __slots__ = (
        "admitted", "budget", "decode", "drafts", "lacks_blocks", "now", "preempted", "prefills", "skipped",
        "victims",
    )  # fmt: skip

    def __init__(self, config: EngineConfig, now: float, victims: VictimPolicy) -> None:
        self.now = now
        self.victims = victims
        self.budget = SchedulingBudget.of(config)
        self.prefills = PrefillChunks(config, self.budget)
        self.decode: list[ScheduledSequence] = []
        self.drafts: dict[Sequence, tuple[int, ...]] = {}
        self.admitted: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.skipped: list[Skipped] = []
        self.lacks_blocks = False

    @property
    def is_empty(self) -> bool:
        return not (self.decode or self.prefills)

    @property
    def is_full(self) -> bool:
        """Whether no other sequence can be added, however small."""
        return self.lacks_blocks or not self.budget.remaining_tokens

    def continue_prefills(self, prefilling: list[Sequence]) -> None:
        """Add the next chunk of each prefill under way that the budget has room for."""
        for sequence in prefilling:
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # Preempted for a decode of this step.
            num_new_tokens = self.prefills.first_chunk(sequence, sequence.num_computed_tokens)
            if reason := self.budget.exceeded_limit(num_new_tokens, 1, 1):
                self.skip(sequence, reason)
            else:
                self.prefills.add(sequence, num_new_tokens)

    def skip(self, sequence: Sequence, reason: WaitingReason) -> None:
        self.skipped.append(Skipped(sequence, reason))

    def to_outputs(
        self, released_slots: tuple[int, ...] = (), blocks_to_zero: tuple[int, ...] = ()
    ) -> SchedulerOutputs:
        """Distribute the remaining tokens, advance the scheduled sequences, and return the decision."""
        num_queried_tokens = sum(sequence.num_tokens for sequence in self.admitted)
        num_hit_tokens = sum(sequence.num_computed_tokens for sequence in self.admitted)
        decode = self.decode
        prefill: list[ScheduledSequence] = []
        for sequence, num_new_tokens in self.prefills.distribute().items():
            item = _advance(sequence, num_new_tokens)
            (decode if _resumes_decoding(item) else prefill).append(item)
        return SchedulerOutputs(
            decode=tuple(decode),
            prefill=tuple(prefill),
            drafts=self.drafts,
            preempted=tuple(self.preempted),
            skipped=tuple(self.skipped),
            released_slots=released_slots,
            blocks_to_zero=blocks_to_zero,
            num_batched_tokens=self.budget.num_batched_tokens,
            num_prefix_queried_tokens=num_queried_tokens,
            num_prefix_hit_tokens=num_hit_tokens,
            decided_at=self.now,
            bound_by=self.budget.bound_by or (self.skipped[0].reason if self.skipped else None),
        )


def _advance(sequence: Sequence, num_new_tokens: int) -> ScheduledSequence:
    start = sequence.num_computed_tokens
    sequence.num_computed_tokens += num_new_tokens
    samples = sequence.num_computed_tokens == sequence.num_tokens
    logits_from = 0 if sequence.wants_prompt_logprobs else num_new_tokens - samples
    return ScheduledSequence(sequence, start, num_new_tokens, logits_from, samples)


def _resumes_decoding(item: ScheduledSequence) -> bool:
    """Whether it has sampled before, and the prefix cache held all tokens but the newest."""
    return item.samples and item.num_new_tokens == 1 and item.sequence.num_output_tokens > 0
