"""Decides which tokens the next step computes.

Law: there is no prefill phase and no decode phase. A sequence knows tokens and has computed some of them;
each step lets it catch up as far as the budget and the blocks allow. So chunked prefill, recomputation after
a preemption and resuming after a crash are one case. This file knows neither time nor tensors.
"""

import bisect
import time
from collections import Counter
from collections.abc import Callable, Mapping

from engine.block_manager import BlockManager
from engine.budget import SchedulingBudget
from engine.config import EngineConfig
from engine.errors import NeverFits
from engine.outputs import SampledToken, ScheduledSequence, SchedulerOutputs, Skipped, WaitingReason
from engine.sequence import FinishReason, Sequence, SequenceStatus
from engine.waiting_queue import WaitingQueue


class Scheduler:
    """Moves sequences between three containers: `waiting_queue`, `running_queue`, `finished_sequences`.

    `running_queue` is sorted by `Sequence.order`. `finished_sequences` are those that ended since
    `take_finished` was last called.
    """

    def __init__(self, config: EngineConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self._clock = clock
        self._held: dict[Sequence, WaitingReason] = {}
        self.block_manager = BlockManager(
            config.num_kv_blocks, config.block_size, prefix_caching=config.prefix_caching
        )
        self.waiting_queue = WaitingQueue()
        self.running_queue: list[Sequence] = []
        self.finished_sequences: list[Sequence] = []
        self._free_seats = list(reversed(range(config.max_num_seqs)))
        self._released_seats: list[int] = []
        self._passed_over: dict[Sequence, WaitingReason] = {}

    @property
    def num_waiting(self) -> int:
        """Those in line, and those held."""
        return len(self.waiting_queue) + len(self._held)

    @property
    def held_sequences(self) -> list[Sequence]:
        return list(self._held)

    def has_unfinished_sequences(self) -> bool:
        return bool(self.running_queue or self._held) or self.waiting_queue.head is not None

    def add_sequence(self, sequence: Sequence, held: WaitingReason | None = None) -> None:
        """Put a new or resumed sequence in line; one that is `held` waits outside until it is released.

        Raises `NeverFits`, and changes nothing.
        """
        self._refuse_what_never_fits(sequence)
        if held is not None:
            self._held[sequence] = held
        else:
            self.waiting_queue.add(sequence)

    def release(self, sequence: Sequence) -> None:
        """Let a held sequence take its place in line."""
        del self._held[sequence]
        self.waiting_queue.add(sequence)

    def schedule(self) -> SchedulerOutputs:
        """Decide one step: decodes first, then prefills that are under way, then those who wait."""
        budget = SchedulingBudget.of(self.config)
        skipped: list[Skipped] = []
        decode, preempted = self._schedule_decodes(budget, skipped)
        prefill = self._continue_prefills(budget, skipped)
        admitted: list[ScheduledSequence] = []
        if preempted:
            skipped += [Skipped(sequence, WaitingReason.KV_BLOCKS) for sequence in preempted]
        else:
            admitted = self._admit_waiting(budget, skipped)
        self._passed_over = dict(skipped)
        # What a runner is to tidy up waits for a step that it executes.
        is_busy = bool(decode or prefill or admitted)
        resumed = [item for item in admitted if _resumes_decoding(item)]
        return SchedulerOutputs(
            decode=(*decode, *resumed),
            prefill=(*prefill, *(item for item in admitted if item not in resumed)),
            preempted=tuple(preempted),
            skipped=tuple(skipped),
            released_seats=self._take_released_seats() if is_busy else (),
            blocks_to_zero=self.block_manager.take_blocks_to_zero() if is_busy else (),
            num_batched_tokens=budget.num_batched_tokens,
            num_prefix_queried_tokens=sum(item.sequence.num_tokens for item in admitted),
            num_prefix_hit_tokens=sum(item.start for item in admitted),
            bound_by=budget.bound_by or (skipped[0].reason if skipped else None),
        )

    def update(
        self,
        outputs: SchedulerOutputs,
        tokens: Mapping[Sequence, SampledToken],
        finishes: Mapping[Sequence, FinishReason],
    ) -> None:
        """Retire a step: append what was sampled, end what is to end, and free its blocks."""
        for item in outputs.scheduled:
            sequence = item.sequence
            sampled = tokens.get(sequence)
            self.block_manager.publish(sequence)
            if sampled and sampled.token_id is not None:
                sequence.append(sampled.token_id)
            if reason := finishes.get(sequence):
                self.abort(sequence, reason)

    def abort(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence in whatever state it is; nothing happens if it has ended."""
        if sequence.is_finished():
            return
        self._take_out(sequence, distrusted=reason is FinishReason.ERROR)
        sequence.finish(reason)
        self.finished_sequences.append(sequence)

    def take_finished(self) -> list[Sequence]:
        finished, self.finished_sequences = self.finished_sequences, []
        return finished

    def waiting_reason(self, sequence: Sequence) -> WaitingReason:
        """Why a waiting sequence was not taken into the last step."""
        return self._held.get(sequence) or self._passed_over.get(sequence, WaitingReason.BEHIND)

    def waiting_reasons(self) -> dict[WaitingReason, int]:
        """How many wait for which reason; looks at those passed over, not at all who wait."""
        reasons = Counter(
            reason
            for sequence, reason in self._passed_over.items()
            if sequence.status is SequenceStatus.WAITING
        )
        if num_behind := len(self.waiting_queue) - reasons.total():
            reasons[WaitingReason.BEHIND] = num_behind
        return reasons + Counter(self._held.values())

    # Phases of a step, each in the sequences' order.

    def _schedule_decodes(
        self, budget: SchedulingBudget, skipped: list[Skipped]
    ) -> tuple[list[ScheduledSequence], list[Sequence]]:
        scheduled: list[ScheduledSequence] = []
        preempted: list[Sequence] = []
        for sequence in [one for one in self.running_queue if _is_decoding(one)]:
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # Preempted above, for one that comes before it.
            if reason := budget.refusal(1, 1):
                skipped.append(Skipped(sequence, reason))
                continue
            preempted += self._make_room(sequence)
            if sequence.status is SequenceStatus.RUNNING:
                budget.add(1, 1)
                scheduled.append(_advance(sequence, 1))
        return scheduled, preempted

    def _continue_prefills(self, budget: SchedulingBudget, skipped: list[Skipped]) -> list[ScheduledSequence]:
        scheduled: list[ScheduledSequence] = []
        for sequence in self.running_queue:
            if not sequence.num_uncomputed_tokens or _is_decoding(sequence):
                continue  # Taken into this step already, or passed over as a decode.
            num_new_tokens = min(sequence.num_uncomputed_tokens, max(1, budget.remaining_tokens))
            if reason := budget.refusal(num_new_tokens, 1, 1):
                skipped.append(Skipped(sequence, reason))
                continue
            budget.add(num_new_tokens, 1, 1)
            scheduled.append(_advance(sequence, num_new_tokens))
        return scheduled

    def _admit_waiting(self, budget: SchedulingBudget, skipped: list[Skipped]) -> list[ScheduledSequence]:
        """Strictly from the head: one that does not fit keeps all behind it waiting."""
        scheduled: list[ScheduledSequence] = []
        while (sequence := self.waiting_queue.head) is not None:
            prefix = self.block_manager.find_prefix(sequence)
            num_found_tokens = len(prefix) * self.config.block_size
            num_new_tokens = self._first_chunk(sequence, num_found_tokens, budget)
            if reason := self._refusal(sequence, prefix, num_new_tokens, budget):
                skipped.append(Skipped(sequence, reason))
                break
            self._seat(self.waiting_queue.pop(), num_found_tokens)
            budget.add(num_new_tokens, 1, 1)
            scheduled.append(_advance(sequence, num_new_tokens))
        return scheduled

    def _refusal(
        self, sequence: Sequence, prefix: list[int], num_new_tokens: int, budget: SchedulingBudget
    ) -> WaitingReason | None:
        """Why the head cannot be admitted; if it can, it holds its blocks now."""
        if not self._free_seats:
            return WaitingReason.SEQ_BUDGET
        if reason := budget.refusal(num_new_tokens, 1, 1):
            return reason
        return None if self.block_manager.allocate(sequence, prefix) else WaitingReason.KV_BLOCKS

    def _first_chunk(self, sequence: Sequence, num_found_tokens: int, budget: SchedulingBudget) -> int:
        num_left = sequence.num_tokens - num_found_tokens
        # What has sampled before may always be computed again in chunks: it can have grown past the budget,
        # and would never be computed in one step.
        if self.config.chunked_prefill or sequence.num_output_tokens:
            return min(num_left, max(1, budget.remaining_tokens))
        return num_left

    def _make_room(self, sequence: Sequence) -> list[Sequence]:
        """Let `sequence` hold its blocks, at the cost of the last in order, which may be itself.

        The first in order never loses: alone it fits, since one that outgrows the pool ends before.
        """
        preempted: list[Sequence] = []
        while sequence.status is SequenceStatus.RUNNING and not self.block_manager.allocate(sequence):
            victim = self.running_queue[-1]
            self._take_out(victim)
            victim.preempt()
            self.waiting_queue.add(victim)
            preempted.append(victim)
        return preempted

    def _seat(self, sequence: Sequence, num_found_tokens: int) -> None:
        sequence.admit(self._free_seats.pop(), num_found_tokens)
        bisect.insort(self.running_queue, sequence, key=lambda one: one.order)

    def _take_out(self, sequence: Sequence, *, distrusted: bool = False) -> None:
        """Out of its queue, off its seat, its blocks back; `distrusted`: what it wrote may not be finite."""
        if sequence.status is SequenceStatus.WAITING:
            if self._held.pop(sequence, None) is None:
                self.waiting_queue.remove(sequence)
            return
        self.running_queue.remove(sequence)
        if distrusted:
            self.block_manager.distrust(sequence)
        self.block_manager.free(sequence)
        assert sequence.seat is not None
        self._free_seats.append(sequence.seat)
        self._released_seats.append(sequence.seat)

    def _take_released_seats(self) -> tuple[int, ...]:
        released = tuple(self._released_seats)
        self._released_seats.clear()
        return released

    def _refuse_what_never_fits(self, sequence: Sequence) -> None:
        config, prompt_len = self.config, sequence.get_prompt_len()
        if prompt_len >= config.max_model_len:
            limit = f"the model takes at most {config.max_model_len - 1} and one output"
        elif prompt_len > config.kv_capacity:
            limit = f"the KV cache holds {config.kv_capacity}"
        elif prompt_len > config.max_prompt_tokens and not sequence.num_output_tokens:
            limit = f"without chunked prefill a step takes at most {config.max_num_batched_tokens}"
        else:
            return
        raise NeverFits("prompt", f"has {prompt_len} tokens; {limit}")


def _is_decoding(sequence: Sequence) -> bool:
    return sequence.num_uncomputed_tokens == 1 and sequence.num_output_tokens > 0


def _resumes_decoding(item: ScheduledSequence) -> bool:
    """It has sampled before, and found all in the cache but its newest token."""
    return item.samples and item.num_new_tokens == 1 and item.sequence.num_output_tokens > 0


def _advance(sequence: Sequence, num_new_tokens: int) -> ScheduledSequence:
    start = sequence.num_computed_tokens
    sequence.num_computed_tokens += num_new_tokens
    samples = sequence.num_computed_tokens == sequence.num_tokens
    wants_all = sequence.params.prompt_logprobs is not None and not sequence.num_output_tokens
    logits_from = 0 if wants_all else num_new_tokens - samples
    return ScheduledSequence(sequence, start, num_new_tokens, logits_from=logits_from, samples=samples)
