"""Decides which tokens the next step computes.

Law: there is no prefill phase and no decode phase. A sequence knows tokens and has computed some of them;
each step lets it catch up as far as the budget and the blocks allow. So chunked prefill, recomputation after
a preemption and resuming after a crash are one case. Who goes before whom is for the policies in the files
beside this one to say; it knows no tensors.
"""

import time
from collections.abc import Callable, Iterable, Mapping

from engine.config import EngineConfig
from engine.outputs import SampledToken, ScheduledSequence, SchedulerOutputs, WaitingReason
from engine.scheduling.admission import admission_of, refuse_what_never_fits
from engine.scheduling.block_manager import BlockManager
from engine.scheduling.decode_rotation import DecodeRotation
from engine.scheduling.isolation import Isolation
from engine.scheduling.preemption import Preemption
from engine.scheduling.running import Running, by_need
from engine.scheduling.slot_preemption import SlotPreemption
from engine.scheduling.step_plan import StepPlan, VictimPolicy
from engine.sequence import FinishReason, Sequence, SequenceStatus
from engine.waiting.pool import WaitingPool

_new_tuple = tuple.__new__


class Scheduler:
    """Moves sequences between three containers: `waiting_queue`, `running_queue`, `finished_sequences`.

    `running_queue` is sorted by `Sequence.order`. `finished_sequences` are those that ended since
    `take_finished` was last called. `clock` gives seconds that never go back.
    """

    def __init__(self, config: EngineConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.block_manager = BlockManager(
            config.num_kv_blocks, config.block_size, prefix_caching=config.prefix_caching
        )
        self._running = Running(config.max_num_seqs)
        self.running_queue = self._running.queue
        self.finished_sequences: list[Sequence] = []
        self._clock = clock
        self._waiting_pool = WaitingPool(config)
        self.waiting_queue = self._waiting_pool.queue
        self._admission = admission_of(config)
        self._preemption = Preemption(config)
        self._slot_preemption = SlotPreemption(
            self.waiting_queue, self._running, self.block_manager, self._preemption
        )
        self._decode_rotation = DecodeRotation(config)

    @property
    def num_waiting(self) -> int:
        """Those in line, and those held."""
        return len(self._waiting_pool)

    @property
    def held_sequences(self) -> list[Sequence]:
        return self._waiting_pool.held

    def has_unfinished_sequences(self) -> bool:
        return bool(self.running_queue or self._waiting_pool)

    def add_sequence(self, sequence: Sequence, held: WaitingReason | None = None) -> None:
        """Put a new or resumed sequence in line, or hold it outside of the line until it is released.

        Raises `NeverFits`, and changes nothing.
        """
        refuse_what_never_fits(self.config, sequence)
        if sequence.queued_at is None:
            sequence.queued_at = self._clock()
        sequence.waiting_since = sequence.queued_at
        if held:
            self._waiting_pool.hold(sequence, held)
        else:
            self._waiting_pool.join(sequence)

    def release(self, sequence: Sequence) -> None:
        """A held sequence takes its place in line; nothing happens to one that is not held."""
        if self._waiting_pool.release(sequence):
            self._waiting_pool.join(sequence)

    def schedule(self, only: Iterable[Sequence] | None = None) -> SchedulerOutputs:
        """Decide one step: decodes first, then prefills that are under way, then those who wait.

        `only`: all outputs of one request; no other is stepped.
        """
        alone = None if only is None else Isolation(only, self._preemption)
        plan = self._begin(alone or self._preemption)
        if alone is not None:
            self._go_on(*by_need(alone.of(self.running_queue)), plan)
            alone.admit(self.waiting_queue, self.running_queue, plan, self._admit, self._preempt)
            return self._close(plan)
        if victim := self._slot_preemption.claim():
            self._preempt(victim, WaitingReason.SEQ_BUDGET, plan)
        self._go_on(*by_need(self.running_queue), plan)
        self._admit_waiting(plan)
        return self._close(plan)

    def schedule_ahead(self) -> SchedulerOutputs | None:
        """Decide the step after one that is under way; None, and no change, if that could preempt anybody.

        Those who get a token by the step under way, and go on, have it already, whatever it stands for; those
        who get their last one have nothing to compute.
        """
        plan = self._begin(self._preemption)
        decoding, prefilling = by_need(self.running_queue)
        if self._could_preempt(decoding):
            return None
        self._go_on(decoding, prefilling, plan)
        self._admit_waiting(plan)
        return self._close(plan)

    def rollback(self, outputs: SchedulerOutputs) -> None:
        """All of a decision's sequences have ended, and no runner has followed it: it is to tidy up later."""
        self._running.slots.tell_again(outputs.released_slots)
        self.block_manager.zero_later(outputs.blocks_to_zero)

    def update(
        self,
        outputs: SchedulerOutputs,
        tokens: Mapping[Sequence, SampledToken],
        finishes: Mapping[Sequence, FinishReason],
    ) -> None:
        """Retire a step: append what was sampled, end what is to end, and free its blocks.

        Each sequence that samples has a token in `tokens` or an end in `finishes`. What ended while the step
        was under way is passed over.
        """
        running = SequenceStatus.RUNNING
        self._append(tokens)
        for item in outputs.prefill:
            if item.sequence.status is running:
                self.block_manager.publish(item.sequence)
        for sequence, reason in finishes.items():
            if sequence.status is running:
                if reason is not FinishReason.ERROR:
                    self.block_manager.publish(sequence)
                self.abort(sequence, reason)

    def _append(self, tokens: Mapping[Sequence, SampledToken]) -> None:
        """A token comes from a finite row, which was computed from all blocks that its sequence holds."""
        for sequence, sampled in tokens.items():
            if sampled.token_id is not None and sequence.status is SequenceStatus.RUNNING:
                sequence.token_ids.append(sampled.token_id)
                if not sequence.is_verified:
                    self.block_manager.verify(sequence)

    def abort(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence in whatever state it is; nothing happens if it has ended."""
        if sequence.is_finished():
            return
        if reason is FinishReason.ERROR:
            self.block_manager.invalidate(sequence)  # What it read or wrote may not be finite.
        else:
            self.block_manager.forget_unverified(sequence)
        if sequence.status is SequenceStatus.WAITING:
            self._waiting_pool.leave(sequence)
            self._slot_preemption.forget(sequence)
        else:
            self._release_slot(sequence)
        sequence.finish(reason)
        self.finished_sequences.append(sequence)

    def take_finished(self) -> list[Sequence]:
        finished, self.finished_sequences = self.finished_sequences, []
        return finished

    def waiting_reason(self, sequence: Sequence) -> WaitingReason:
        """Why a waiting sequence was not taken into the last step. Raises KeyError when it does not wait."""
        return self._waiting_pool.reason(sequence)

    def waiting_reasons(self) -> dict[WaitingReason, int]:
        """How many wait for which reason; the cost does not grow with how many wait."""
        return self._waiting_pool.reasons()

    # The phases of a step, each in the sequences' order.

    def _begin(self, victims: VictimPolicy) -> StepPlan:
        plan = StepPlan(self.config, self._clock(), victims)
        self.waiting_queue.advance(plan.now)
        return plan

    def _go_on(self, decoding: list[Sequence], prefilling: list[Sequence], plan: StepPlan) -> None:
        """Those that run already."""
        self._schedule_decodes(decoding, prefilling, plan)
        self._continue_prefills(prefilling, plan)

    def _could_preempt(self, decoding: list[Sequence]) -> bool:
        """Whether the head may want another's slot, or those who decode more blocks than are free."""
        if self._slot_preemption.may_arise():
            return True
        num_wanted = sum(one.num_computed_tokens == one.block_end for one in decoding)
        return num_wanted > self.block_manager.num_free_blocks

    def _schedule_decodes(self, decoding: list[Sequence], prefilling: list[Sequence], plan: StepPlan) -> None:
        chosen, passed_over, reason = self._decode_rotation.choose(
            decoding, lambda: self._num_prefill_tokens(prefilling)
        )
        scheduled = plan.decode
        for sequence in chosen:
            start = sequence.num_computed_tokens
            if start == sequence.block_end and not self._next_block(sequence, plan):
                continue
            sequence.num_computed_tokens = start + 1
            # Past its own constructor, which takes twice the time.
            scheduled.append(_new_tuple(ScheduledSequence, (sequence, start, 1, 0, True)))
        plan.budget.add(len(scheduled), len(scheduled))
        for sequence in passed_over:
            plan.skip(sequence, reason)

    def _continue_prefills(self, prefilling: list[Sequence], plan: StepPlan) -> None:
        for sequence in prefilling:
            if sequence.status is not SequenceStatus.RUNNING:
                continue  # Preempted for one of those that decode.
            num_new_tokens = plan.prefills.first_chunk(sequence, sequence.num_computed_tokens)
            if reason := plan.budget.exceeded_limit(num_new_tokens, 1, 1):
                plan.skip(sequence, reason)
            else:
                plan.prefills.take(sequence, num_new_tokens)

    def _admit_waiting(self, plan: StepPlan) -> None:
        """In order, as far as the policy lets others go past one that does not fit."""
        set_aside, num_tried = list[Sequence](), 0
        while (
            head := self._slot_preemption.next_in_line()
        ) is not None and num_tried <= self._admission.max_others:
            if reason := self._admit(head, plan):
                if head not in plan.preempted:
                    plan.skip(head, reason)
                is_guarded = self._slot_preemption.guards(head)
                if is_guarded or plan.is_full or not self._admission.allows_skip(reason):
                    break
                self.waiting_queue.remove(head)
                set_aside.append(head)
            num_tried += bool(set_aside)
        for sequence in set_aside:
            self.waiting_queue.add(sequence)

    def _admit(self, sequence: Sequence, plan: StepPlan) -> WaitingReason | None:
        """Give the head its slot and its blocks, or say why it gets none; nothing has changed then."""
        if plan.lacks_blocks:
            return WaitingReason.KV_BLOCKS
        if not self._running.slots:
            return WaitingReason.SEQ_BUDGET
        if reason := plan.budget.exceeded_limit(1, 1, 1):
            return reason
        prefix = self.block_manager.find_prefix(sequence)
        num_found_tokens = len(prefix) * self.config.block_size
        num_new_tokens = plan.prefills.first_chunk(sequence, num_found_tokens)
        if reason := plan.budget.exceeded_limit(num_new_tokens, 1, 1):
            return reason
        num_tokens = self._preemption.num_tokens_to_hold(sequence)
        if not self.block_manager.allocate(sequence, prefix, num_tokens):
            return WaitingReason.KV_BLOCKS
        self._assign_slot(sequence, num_found_tokens, plan)
        plan.prefills.take(sequence, num_new_tokens)
        return None

    def _num_prefill_tokens(self, prefilling: list[Sequence]) -> int:
        """Tokens that prefills could use in this step, if decodes left them."""
        num_tokens = sum(sequence.num_uncomputed_tokens for sequence in prefilling)
        head, config = self.waiting_queue.head, self.config
        if head is None or not self._running.slots or len(prefilling) >= config.prefill_seqs_limit:
            return num_tokens
        if not config.chunked_prefill and head.num_tokens > config.num_reserved_tokens:
            return num_tokens
        num_blocks = self.block_manager.num_blocks_of(self._preemption.num_tokens_to_hold(head))
        num_found = len(self.block_manager.find_prefix(head))
        lacks_blocks = num_blocks - num_found > self.block_manager.num_free_blocks
        return num_tokens if lacks_blocks else num_tokens + head.num_tokens

    def _next_block(self, sequence: Sequence, plan: StepPlan) -> bool:
        """One block is full: its tenant is charged, it can be found, and another is needed."""
        if sequence.status is not SequenceStatus.RUNNING:
            return False  # Preempted for one that comes before it.
        self._waiting_pool.charge(sequence)
        self.block_manager.publish(sequence)
        return self.block_manager.allocate_next(sequence) or self._make_room(sequence, plan)

    def _make_room(self, sequence: Sequence, plan: StepPlan) -> bool:
        """A block more for a running sequence, at the cost of the last in order, which may be itself.

        The first in order never loses: alone it fits, since one that outgrows the pool ends before. It waits
        where all others are pinned; these need no more blocks, and end.
        """
        plan.lacks_blocks = True
        victim = plan.victims.victim_for_blocks(self.running_queue)
        if victim is None:
            plan.skip(sequence, WaitingReason.KV_BLOCKS)
            return False
        self._preempt(victim, WaitingReason.KV_BLOCKS, plan)
        if victim is sequence:
            return False
        return self.block_manager.allocate_next(sequence) or self._make_room(sequence, plan)

    def _close(self, plan: StepPlan) -> SchedulerOutputs:
        self._waiting_pool.note(plan.skipped)
        # What a runner is to tidy up waits for a step that it executes.
        if not plan.is_busy:
            return plan.close()
        return plan.close(self._running.slots.take_released(), self.block_manager.take_blocks_to_zero())

    # Changes of state: slot, blocks and container together.

    def _assign_slot(self, sequence: Sequence, num_found_tokens: int, plan: StepPlan) -> None:
        """Out of the line; its tenant is charged for what is to be computed and never was before."""
        sequence.is_promoted = self.waiting_queue.is_head_promoted and sequence is self.waiting_queue.head
        sequence.is_pinned = self._preemption.is_to_be_pinned(sequence)
        sequence.num_charged_tokens = max(sequence.num_charged_tokens, num_found_tokens)
        self._waiting_pool.charge(sequence)
        self._waiting_pool.take(sequence)
        self._running.enter(sequence, num_found_tokens)
        sequence.waited_seconds = plan.now - sequence.waiting_since
        if sequence.scheduled_at is None:
            sequence.scheduled_at = plan.now
        plan.admitted.append(sequence)
        self._slot_preemption.forget(sequence)

    def _preempt(self, victim: Sequence, reason: WaitingReason, plan: StepPlan) -> None:
        self.block_manager.publish(victim)
        self._release_slot(victim)
        victim.preempt()
        victim.waiting_since = plan.now - victim.waited_seconds
        self._waiting_pool.join(victim)
        plan.preempted.append(victim)
        plan.skip(victim, reason)

    def _release_slot(self, sequence: Sequence) -> None:
        """Off its slot, its blocks back, and its tenant charged for all of it."""
        self._running.leave(sequence)
        self._waiting_pool.charge(sequence)
        self.block_manager.free(sequence)
