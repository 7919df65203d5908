"""The scheduler: decides which tokens the next step computes.

There is no prefill phase and no decode phase of a sequence: it has known tokens, some of them computed, and
each step computes more of them within the budget and the free blocks. Chunked prefill, recomputation after a
preemption and resuming after a crash are the same case.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sized

from engine.config import EngineConfig
from engine.outputs import SampledToken, SchedulerOutputs, WaitingReason
from engine.scheduling.admission import Admission, check_prompt_length
from engine.scheduling.decodes import DecodeScheduler
from engine.scheduling.drafts import DraftScheduler
from engine.scheduling.isolation import Isolation
from engine.scheduling.running import split_by_phase
from engine.scheduling.slot_preemption import SlotPreemption
from engine.scheduling.state import SchedulerState
from engine.scheduling.step_plan import StepPlan, VictimPolicy
from engine.sequence import FinishReason, Sequence, SequenceStatus


class Scheduler:
    """Moves sequences between three containers: `waiting_queue`, `running_queue`, `finished_sequences`.

    `running_queue` is sorted by `Sequence.order`. `finished_sequences` have ended since the last call of
    `pop_finished`. `clock` returns monotonic seconds.
    """

    def __init__(self, config: EngineConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self.finished_sequences: list[Sequence] = []
        self._clock = clock
        self._state = SchedulerState(config)
        self.block_manager = self._state.block_manager
        self.running_queue = self._state.running.queue
        self.waiting_queue = self._state.waiting.queue
        self._slots = SlotPreemption(self._state)
        self._decodes = DecodeScheduler(self._state)
        self._admission = Admission(self._state, self._slots)
        self._drafts = DraftScheduler(config, self._state)

    @property
    def num_waiting(self) -> int:
        """Queued and deferred sequences."""
        return len(self._state.waiting)

    @property
    def deferred_sequences(self) -> list[Sequence]:
        return self._state.waiting.deferred

    def has_unfinished_sequences(self) -> bool:
        return bool(self.running_queue or self._state.waiting)

    def add_sequence(self, sequence: Sequence, deferred: WaitingReason | None = None) -> None:
        """Add a new or resumed sequence to the queue.

        `deferred`: why it stays outside of the queue until `enqueue` is called. Raises `NeverFits`, and
        changes nothing.
        """
        check_prompt_length(self.config, sequence)
        sequence.start_waiting(self._clock())
        if deferred:
            self._state.waiting.defer(sequence, deferred)
        else:
            self.waiting_queue.add(sequence)

    def enqueue(self, sequence: Sequence) -> None:
        """Move a deferred sequence to its position in the queue. Does nothing if it is not deferred."""
        self._state.waiting.enqueue(sequence)

    def schedule(self) -> SchedulerOutputs:
        """Decide one step: decodes first, then prefills under way, waiting sequences and drafts."""
        plan = self._start_plan(self._state.preemption)
        self._slots.preempt_for_head(plan)
        decoding, prefilling = split_by_phase(self.running_queue)
        self._decodes.schedule(decoding, prefilling, plan)
        plan.continue_prefills(prefilling)
        self._admission.admit_waiting(plan)
        self._drafts.schedule(plan)
        return self._finish_plan(plan)

    def schedule_isolated(self, sequences: Iterable[Sequence]) -> SchedulerOutputs:
        """Decide one step of `sequences` alone, which are all outputs of one request."""
        isolation = Isolation(sequences, self._state, self._admission)
        plan = self._start_plan(isolation)
        decoding, prefilling = split_by_phase(isolation.select(self.running_queue))
        self._decodes.schedule(decoding, prefilling, plan)
        plan.continue_prefills(prefilling)
        isolation.admit_waiting(plan)
        return self._finish_plan(plan)

    def schedule_ahead(self) -> SchedulerOutputs | None:
        """Decide the step after the one in flight. Returns None, and changes nothing, if that could preempt
        a sequence.

        A sequence that continues after the step in flight has a placeholder for its next token. One that gets
        its last token by that step has nothing to compute.
        """
        plan = self._start_plan(self._state.preemption)
        decoding, prefilling = split_by_phase(self.running_queue)
        if self._slots.is_possible() or self._decodes.could_preempt(decoding):
            return None
        self._decodes.schedule(decoding, prefilling, plan)
        plan.continue_prefills(prefilling)
        self._admission.admit_waiting(plan)
        return self._finish_plan(plan)

    def rollback(self, outputs: SchedulerOutputs) -> None:
        """Defer the clean-up of a decision that is not executed, since its sequences have ended."""
        self._state.running.restore_released_slots(outputs.released_slots)
        self.block_manager.restore_blocks_to_zero(outputs.blocks_to_zero)

    def update(
        self,
        outputs: SchedulerOutputs,
        tokens: Mapping[Sequence, SampledToken],
        finishes: Mapping[Sequence, FinishReason],
    ) -> None:
        """Apply the results of a step: append sampled tokens, publish written blocks, end sequences.

        Each sequence that samples is in `tokens` or in `finishes`. Sequences that have ended since the
        decision are ignored.
        """
        self._append(tokens)
        for item in outputs.prefill:
            if item.sequence.status is SequenceStatus.RUNNING:
                self.block_manager.publish(item.sequence)
        self._end(finishes)

    def accept(
        self, tokens: Mapping[Sequence, SampledToken], finishes: Mapping[Sequence, FinishReason]
    ) -> None:
        """Append the tokens after drafted ones, which equal the newest tokens of their sequences.

        The step that verified a draft has computed its keys and values.
        """
        for sequence in tokens:
            self.block_manager.advance(sequence)
        self._append(tokens)
        self._end(finishes)

    def record_drafts(
        self, drafts: Mapping[Sequence, tuple[int, ...]], accepted: Mapping[Sequence, Sized]
    ) -> None:
        """`accepted`: one value for each drafted token that was right, by sequence."""
        for sequence, draft in drafts.items():
            self._drafts.record(sequence, len(draft), len(accepted.get(sequence, ())))

    def abort(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence in any status. Does nothing if it has ended."""
        if sequence.is_finished():
            return
        if reason is FinishReason.ERROR:
            self.block_manager.invalidate(sequence)  # Its blocks may hold non-finite values.
        else:
            self.block_manager.unpublish_unverified(sequence)
        if sequence.status is SequenceStatus.WAITING:
            self._state.waiting.remove(sequence)
            self._slots.end_claim(sequence)
        else:
            self._state.release(sequence)
        sequence.finish(reason)
        self.finished_sequences.append(sequence)

    def pop_finished(self) -> list[Sequence]:
        finished, self.finished_sequences = self.finished_sequences, []
        return finished

    def waiting_reason(self, sequence: Sequence) -> WaitingReason:
        """Why the last step did not admit a waiting sequence. Raises KeyError if it does not wait."""
        return self._state.waiting.reason(sequence)

    def waiting_reasons(self) -> dict[WaitingReason, int]:
        """The number of waiting sequences by reason. The cost does not depend on how many wait."""
        return self._state.waiting.reasons()

    def _start_plan(self, victims: VictimPolicy) -> StepPlan:
        plan = StepPlan(self.config, self._clock(), victims)
        self.waiting_queue.advance(plan.now)
        return plan

    def _finish_plan(self, plan: StepPlan) -> SchedulerOutputs:
        self._state.waiting.record_skipped(plan.skipped)
        # The runner cleans up in the next step that it executes.
        if plan.is_empty:
            return plan.to_outputs()
        return plan.to_outputs(
            self._state.running.pop_released_slots(), self.block_manager.pop_blocks_to_zero()
        )

    def _end(self, finishes: Mapping[Sequence, FinishReason]) -> None:
        for sequence, reason in finishes.items():
            if sequence.status is SequenceStatus.RUNNING:
                if reason is not FinishReason.ERROR:
                    self.block_manager.publish(sequence)
                self.abort(sequence, reason)

    def _append(self, tokens: Mapping[Sequence, SampledToken]) -> None:
        """Append sampled tokens. A token from finite logits verifies the blocks of its sequence."""
        for sequence, sampled in tokens.items():
            if sampled.token_id is not None and sequence.status is SequenceStatus.RUNNING:
                sequence.token_ids.append(sampled.token_id)
                if not sequence.is_verified:
                    self.block_manager.verify(sequence)
