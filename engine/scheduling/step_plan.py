"""The decision on one step while it is being made. Knows how it is written down, not how it is made."""

from typing import Protocol

from engine.config import EngineConfig
from engine.outputs import ScheduledSequence, SchedulerOutputs, Skipped, WaitingReason
from engine.scheduling.budget import SchedulingBudget
from engine.scheduling.prefill_chunks import PrefillChunks
from engine.sequence import Sequence


class VictimPolicy(Protocol):
    """Who gives way in a step. `running` is sorted by `Sequence.order`."""

    def victim_for_blocks(self, running: list[Sequence]) -> Sequence | None: ...


class StepPlan:
    """What a step takes, what it passes over and why, its ledger, and the rule by which others give way.

    `lacks_blocks`: a running sequence lost its blocks, or did not get those that it needs.
    """

    __slots__ = (
        "admitted", "budget", "decode", "lacks_blocks", "now", "preempted", "prefills", "skipped", "victims",
    )  # fmt: skip

    def __init__(self, config: EngineConfig, now: float, victims: VictimPolicy) -> None:
        self.now = now
        self.victims = victims
        self.budget = SchedulingBudget.of(config)
        self.prefills = PrefillChunks(config, self.budget)
        self.decode: list[ScheduledSequence] = []
        self.admitted: list[Sequence] = []
        self.preempted: list[Sequence] = []
        self.skipped: list[Skipped] = []
        self.lacks_blocks = False

    @property
    def is_busy(self) -> bool:
        return bool(self.decode or self.prefills)

    @property
    def is_full(self) -> bool:
        """Nobody else can be taken, whoever it is."""
        return self.lacks_blocks or not self.budget.remaining_tokens

    def skip(self, sequence: Sequence, reason: WaitingReason) -> None:
        self.skipped.append(Skipped(sequence, reason))

    def close(
        self, released_slots: tuple[int, ...] = (), blocks_to_zero: tuple[int, ...] = ()
    ) -> SchedulerOutputs:
        """Deal out what is left, advance all that are taken, and freeze the decision."""
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
    """It has sampled before, and found all in the cache but its newest token."""
    return item.samples and item.num_new_tokens == 1 and item.sequence.num_output_tokens > 0
