"""Whatever the order of arrivals, steps, ends and aborts: the books balance and work goes on."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from engine.config import EngineConfig
from engine.errors import NeverFits
from engine.outputs import SampledToken, SchedulerOutputs, Skipped
from engine.sampling_params import SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import FinishReason, Sequence, SequenceStatus
from engine.stopping import StopRules


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        budget=st.integers(1, 12),
        seqs=st.integers(1, 5),
        prefills=st.integers(1, 5),
        blocks=st.integers(3, 14),
        chunked=st.booleans(),
        cached=st.booleans(),
    )
    def build(self, budget: int, seqs: int, prefills: int, blocks: int, chunked: bool, cached: bool) -> None:
        self.config = EngineConfig(
            max_model_len=40,
            num_kv_blocks=blocks,
            block_size=4,
            max_num_batched_tokens=budget,
            max_num_seqs=seqs,
            max_num_prefill_seqs=prefills,
            chunked_prefill=chunked,
            prefix_caching=cached,
        )
        # What a device would have in each slot of each block: all tokens up to the one computed there.
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self.scheduler = Scheduler(self.config)
        self.stop_rules = StopRules(self.config)
        self.sequences: list[Sequence] = []

    @rule(
        prompt=st.integers(1, 30),
        last=st.integers(1, 2),
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 4),
    )
    def arrive(self, prompt: int, last: int, max_tokens: int, priority: int) -> None:
        sequence = Sequence(
            f"r{len(self.sequences)}",
            [*[1] * (prompt - 1), last],
            SamplingParams(max_tokens=max_tokens),
            arrival=float(len(self.sequences)),
            priority=priority,
        )
        try:
            self.scheduler.add_sequence(sequence)
        except NeverFits:
            assert sequence not in self.scheduler.waiting_queue
        else:
            self.sequences.append(sequence)

    @precondition(lambda self: self.scheduler.has_unfinished_sequences())
    @rule(fails=st.booleans())
    def step(self, fails: bool) -> None:
        first = min(
            (s for s in self.sequences if s.status is SequenceStatus.RUNNING), key=order, default=None
        )
        waiting_before = list(self.scheduler.waiting_queue)
        outputs = self.scheduler.schedule()
        self.check(outputs, first, waiting_before)
        self.compute(outputs)
        tokens, finishes = {}, {}
        for item in outputs.scheduled:
            if fails:
                finishes[item.sequence] = FinishReason.ERROR
                fails = False
            elif item.samples:
                tokens[item.sequence] = SampledToken(7)
                if reason := self.stop_rules.reason(item.sequence, 7):
                    finishes[item.sequence] = reason
        self.scheduler.update(outputs, tokens, finishes)

    def compute(self, outputs: SchedulerOutputs) -> None:
        """As a device would: rows are written, then each sequence reads all that it claims to have."""
        for item in outputs.scheduled:
            for position in range(item.start, item.start + item.num_new_tokens):
                self.slots[self.slot(item.sequence, position)] = tuple(
                    item.sequence.token_ids[: position + 1]
                )
        for item in outputs.scheduled:
            for position in range(item.start + item.num_new_tokens):
                read = self.slots.get(self.slot(item.sequence, position))
                assert read == tuple(item.sequence.token_ids[: position + 1]), "another's keys and values"

    def slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        return sequence.block_table[position // 4], position % 4

    def check(
        self, outputs: SchedulerOutputs, first: Sequence | None, waiting_before: list[Sequence]
    ) -> None:
        config = self.config
        scheduled = [item.sequence for item in outputs.scheduled]
        assert scheduled, "there is work, yet nothing was scheduled"
        assert len(set(scheduled)) == len(scheduled)
        num_tokens = sum(item.num_new_tokens for item in outputs.scheduled)
        assert num_tokens == outputs.num_batched_tokens <= config.max_num_batched_tokens
        assert len(scheduled) <= config.max_num_seqs
        assert len(outputs.prefill) <= config.max_num_prefill_seqs
        assert all(item.num_new_tokens == 1 for item in outputs.decode)
        assert all(item.num_new_tokens >= 1 for item in outputs.prefill)
        assert first not in outputs.preempted
        admitted = [one for one in waiting_before if one in scheduled]
        assert admitted == waiting_before[: len(admitted)], "one passed another in line"
        assert not (outputs.preempted and admitted)
        assert all(isinstance(one, Skipped) for one in outputs.skipped)

    @precondition(lambda self: self.scheduler.has_unfinished_sequences())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = [one for one in self.sequences if not one.is_finished()]
        self.scheduler.abort(data.draw(st.sampled_from(live)), FinishReason.CANCELLED)

    @invariant()
    def every_block_is_free_or_held_and_counted(self) -> None:
        blocks = self.scheduler.block_manager
        held = Counter(block for one in self.sequences for block in one.block_table)
        assert 0 not in held
        assert len(held) + blocks.num_free_blocks == self.config.num_kv_blocks
        assert all(blocks.reference_count(block) == number for block, number in held.items())
        cached = [block for block in blocks._free if block in blocks.prefix_cache]
        assert blocks.num_cached_blocks == len(cached)

    @invariant()
    def only_those_who_run_hold_seats_and_blocks(self) -> None:
        running = [one for one in self.sequences if one.status is SequenceStatus.RUNNING]
        seats = [one.seat for one in running]
        assert len(set(seats)) == len(seats) <= self.config.max_num_seqs
        assert None not in seats
        for one in self.sequences:
            assert one.status is SequenceStatus.RUNNING or not (one.block_table or one.seat is not None)
            assert one.num_computed_tokens <= len(one.block_table) * 4 or one.is_finished()

    @invariant()
    def each_stands_in_the_container_of_its_status(self) -> None:
        for status, container in (
            (SequenceStatus.WAITING, list(self.scheduler.waiting_queue)),
            (SequenceStatus.RUNNING, self.scheduler.running_queue),
            (SequenceStatus.FINISHED, self.scheduler.finished_sequences),
        ):
            expected = [one for one in self.sequences if one.status is status]
            assert sorted(container, key=order) == sorted(expected, key=order)
        assert list(self.scheduler.waiting_queue) == sorted(self.scheduler.waiting_queue, key=order)
        assert self.scheduler.running_queue == sorted(self.scheduler.running_queue, key=order)

    def teardown(self) -> None:
        """Whatever is left comes to its end in a bounded number of steps, and nothing leaks."""
        if not hasattr(self, "scheduler"):
            return
        tokens_left = sum(40 * 40 for one in self.sequences if not one.is_finished())
        for _ in range(tokens_left):
            if not self.scheduler.has_unfinished_sequences():
                break
            self.step(fails=False)
        assert not self.scheduler.has_unfinished_sequences(), "livelock"
        assert self.scheduler.block_manager.num_free_blocks == self.config.num_kv_blocks


def order(sequence: Sequence) -> tuple[int, float, str]:
    return sequence.order


@pytest.mark.parametrize("steps", [25, 60])
def test_the_books_balance(steps: int) -> None:
    run_state_machine_as_test(
        SchedulerMachine, settings=settings(max_examples=120, stateful_step_count=steps, deadline=None)
    )
