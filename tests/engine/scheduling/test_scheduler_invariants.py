"""Invariants of the scheduler under any sequence of arrivals, steps, ends and aborts.

One state machine decides each step after the one before; the other one uses asynchronous scheduling with an
executor that declines and fails at random.
"""

import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
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
from engine.outputs import SampledToken, ScheduledSequence, SchedulerOutputs, TokenLogprobs, WaitingReason
from engine.requests.stop_rules import StopRules
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.sequence import FinishReason, Sequence, SequenceStatus
from engine.steps.fault_isolation import StepExecutor
from engine.steps.pipeline import Pipeline
from engine.steps.step_report import StepRecorder
from tests.engine.fakes import Clock

BLOCK_SIZE = 4
SAMPLED = 7
DEFERRED = (WaitingReason.GRAMMAR, WaitingReason.SIBLING)


@dataclass
class Before:
    """The state before a step."""

    queue: list[Sequence]
    running: list[Sequence]
    promoted: set[Sequence]
    pinned: set[Sequence]
    num_free_blocks: int

    def has_room(self, config: EngineConfig, isolated: list[Sequence]) -> bool:
        """Whether `isolated` could run to their greatest length without a preemption."""
        live = [one for one in isolated if not one.is_finished()]
        num_new = sum(one not in self.running for one in live)
        num_missing = sum(config.max_model_len // BLOCK_SIZE - len(one.block_table) for one in live)
        return len(self.running) + num_new <= config.max_num_seqs and num_missing <= self.num_free_blocks


def configs(max_blocks: int = 14, max_tokens_of_step: int = 12) -> st.SearchStrategy[EngineConfig]:
    return st.builds(
        EngineConfig,
        max_model_len=st.just(40),
        num_kv_blocks=st.integers(3, max_blocks),
        block_size=st.just(BLOCK_SIZE),
        max_num_batched_tokens=st.integers(1, max_tokens_of_step),
        max_num_seqs=st.integers(1, 5),
        max_num_prefill_seqs=st.integers(1, 5),
        chunked_prefill=st.booleans(),
        prefix_caching=st.booleans(),
        policy=st.sampled_from(["fifo", "skip_ahead"]),
        max_skip_ahead=st.integers(1, 3),
        ageing_seconds=st.sampled_from([None, 3.0, 10.0]),
        max_waiting_seconds=st.sampled_from([None, 5.0, 20.0]),
        max_preemptions=st.integers(0, 2),
        prefill_reserve=st.sampled_from([0.0, 0.0, 0.3, 0.6]),
        max_chunk_tokens=st.sampled_from([None, 1, 3]),
    )


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(config=configs())
    def build(self, config: EngineConfig) -> None:
        self.begin(config)

    def begin(self, config: EngineConfig) -> None:
        self.config = config
        self.clock = Clock()
        # By (block, offset): all tokens up to the one whose keys and values a device would hold there.
        self.cells: dict[tuple[int, int], tuple[int, ...]] = {}
        self.scheduler = Scheduler(config, clock=self.clock)
        self.stop_rules = StopRules(config)
        self.sequences: list[Sequence] = []
        self.deferred: set[Sequence] = set()
        self.num_empty_steps = 0

    @rule(
        prompt=st.integers(1, 30),
        last=st.integers(1, 2),
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 4),
        n=st.sampled_from([1, 1, 1, 3]),
        deferred=st.sampled_from([None, None, *DEFERRED]),
        prompt_logprobs=st.sampled_from([None, None, None, 1]),
        logprobs=st.sampled_from([None, 1]),
    )
    def arrive(
        self,
        prompt: int,
        last: int,
        max_tokens: int,
        priority: int,
        n: int,
        deferred: WaitingReason | None,
        prompt_logprobs: int | None,
        logprobs: int | None,
    ) -> None:
        arrival = len(self.sequences)
        params = SamplingParams(
            max_tokens=max_tokens, n=n, prompt_logprobs=prompt_logprobs, logprobs=logprobs
        )
        for index in range(n):
            sequence = Sequence(
                f"r{arrival}",
                [*[1] * (prompt - 1), last],
                params,
                arrival_time=float(arrival),
                index=index,
                priority=priority,
                cache_salt=b"" if n == 1 else b"%d" % arrival,
            )
            deferred = WaitingReason.SIBLING if index else deferred
            try:
                self.scheduler.add_sequence(sequence, deferred)
            except NeverFits:
                assert sequence not in self.scheduler.waiting_queue
                assert not index
                return
            self.sequences.append(sequence)
            if deferred:
                self.deferred.add(sequence)

    @precondition(lambda self: self.deferred)
    @rule(data=st.data())
    def enqueue(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.deferred, key=order)))
        self.deferred.remove(sequence)
        self.scheduler.enqueue(sequence)
        self.scheduler.enqueue(sequence)

    @rule(seconds=st.sampled_from([0.5, 2.0, 7.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @precondition(lambda self: self.scheduler.has_unfinished_sequences())
    @rule(fails=st.booleans(), data=st.data())
    def step(self, fails: bool, data: st.DataObject) -> None:
        self.one_step(fails=fails, data=data)

    @precondition(lambda self: self.scheduler.has_unfinished_sequences())
    @rule(fails=st.booleans(), data=st.data(), num_steps=st.integers(1, 3))
    def isolated_steps(self, fails: bool, data: st.DataObject, num_steps: int) -> None:
        """Isolated steps of one request."""
        live = [one for one in self.sequences if not one.is_finished()]
        request_id = data.draw(st.sampled_from(live)).request_id
        for _ in range(num_steps):
            isolated = [one for one in self.sequences if one.request_id == request_id]
            self.one_step(fails=fails, data=data, isolated=isolated)

    @precondition(lambda self: self.scheduler.has_unfinished_sequences())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = [one for one in self.sequences if not one.is_finished()]
        self.end(data.draw(st.sampled_from(live)))

    def end(self, sequence: Sequence) -> None:
        self.deferred.discard(sequence)
        self.scheduler.abort(sequence, FinishReason.CANCELLED)

    def one_step(
        self,
        *,
        fails: bool = False,
        data: st.DataObject | None = None,
        isolated: list[Sequence] | None = None,
    ) -> None:
        self.scheduler.waiting_queue.advance(self.clock.now)
        running = list(self.scheduler.running_queue)
        before = Before(
            list(self.scheduler.waiting_queue),
            running,
            set(list(self.scheduler.waiting_queue)[: self.scheduler.waiting_queue.is_head_promoted]),
            {one for one in running if one.is_pinned},
            self.scheduler.block_manager.num_free_blocks,
        )
        outputs = self.schedule(before) if isolated is None else self.schedule_isolated(isolated, before)
        self.check_budgets(outputs)
        self.check_rows(outputs)
        self.compute(outputs)
        if data and outputs.scheduled and data.draw(st.booleans()):
            self.end(data.draw(st.sampled_from(outputs.scheduled)).sequence)
        tokens, finishes = {}, {}
        for item in outputs.scheduled:
            if fails:
                finishes[item.sequence] = FinishReason.ERROR
                fails = False
            elif item.samples:
                tokens[item.sequence] = SampledToken(SAMPLED)
                if reason := self.stop_rules.reason(item.sequence, SAMPLED):
                    finishes[item.sequence] = reason
        self.scheduler.update(outputs, tokens, finishes)

    def schedule(self, before: Before) -> SchedulerOutputs:
        outputs = self.scheduler.schedule()
        self.check_work(outputs)
        self.check_order(outputs, before)
        self.check_preemption(outputs, before)
        return outputs

    def schedule_isolated(self, isolated: list[Sequence], before: Before) -> SchedulerOutputs:
        has_room = before.has_room(self.config, isolated)
        has_work = any(one in before.running or one in before.queue for one in isolated)
        outputs = self.scheduler.schedule_isolated(isolated)
        self.check_isolated(outputs, isolated, before)
        assert bool(outputs.scheduled) == has_work, "no progress"
        assert not (has_room and outputs.preempted), "a needless preemption"
        return outputs

    def check_budgets(self, outputs: SchedulerOutputs) -> None:
        config = self.config
        scheduled = [item.sequence for item in outputs.scheduled]
        assert len(set(scheduled)) == len(scheduled)
        assert all(one.status is SequenceStatus.RUNNING for one in scheduled)
        num_tokens = sum(item.num_new_tokens for item in outputs.scheduled)
        assert num_tokens == outputs.num_batched_tokens <= config.max_num_batched_tokens
        assert len(scheduled) <= config.max_num_seqs
        assert len(outputs.prefill) <= config.prefill_seqs_limit
        assert all(item.num_new_tokens == 1 for item in outputs.decode)
        assert all(item.num_new_tokens >= 1 for item in outputs.prefill)
        if not config.chunked_prefill:
            whole = [item for item in outputs.prefill if not item.sequence.num_output_tokens]
            assert all(item.samples for item in whole), "a prompt was split with chunked prefill off"

    def check_work(self, outputs: SchedulerOutputs) -> None:
        if outputs.scheduled or self.deferred == {one for one in self.sequences if not one.is_finished()}:
            self.num_empty_steps = 0
        else:
            self.num_empty_steps += 1
            assert outputs.skipped, "nothing was scheduled, and no reason is reported"
            assert self.num_empty_steps < 2, "nothing was scheduled in two steps"

    def check_isolated(self, outputs: SchedulerOutputs, isolated: list[Sequence], before: Before) -> None:
        """Other requests are not stepped. They are preempted from the last to the first, pinned ones last."""
        assert {item.sequence for item in outputs.scheduled} <= set(isolated), "another request was stepped"
        others = [one for one in before.running if one not in isolated]
        victims = [one for one in outputs.preempted if one not in isolated]
        pinned = [one for one in others if one in before.pinned]
        expected = [*reversed([one for one in others if one not in before.pinned]), *reversed(pinned)]
        assert victims == expected[: len(victims)], "not the last in order"
        own_victims = [one for one in outputs.preempted if one in isolated]
        assert not own_victims or victims == expected, "its own output before all others"

    def check_order(self, outputs: SchedulerOutputs, before: Before) -> None:
        """No sequence went before an earlier one of its priority under "fifo", or before a promoted one."""
        admitted = {item.sequence for item in outputs.scheduled} & set(before.queue)
        if outputs.preempted and not self.preempted_for_slot(outputs):
            assert not admitted, "a step that preempted for blocks admitted a sequence"
        left = [one for one in before.queue if one not in admitted]
        if self.config.policy == "fifo":
            for queue in by_priority(before.queue):
                first = [one for one in queue if one in admitted]
                assert first == queue[: len(first)], "a sequence went before an earlier one of its priority"
        if before.promoted.intersection(left):
            assert not admitted, "a sequence went before a promoted one"

    def preempted_for_slot(self, outputs: SchedulerOutputs) -> bool:
        reasons = dict(outputs.skipped)
        return any(reasons.get(one) is WaitingReason.SEQ_BUDGET for one in outputs.preempted)

    def check_preemption(self, outputs: SchedulerOutputs, before: Before) -> None:
        assert not before.pinned.intersection(outputs.preempted), "a pinned sequence was preempted"
        for victim in outputs.preempted:
            assert victim.num_preemptions <= self.config.max_preemptions
            if dict(outputs.skipped)[victim] is WaitingReason.SEQ_BUDGET:
                assert len(before.running) == self.config.max_num_seqs
                assert before.queue[0].priority < victim.priority
                assert before.queue[0] not in before.promoted
            else:
                assert victim is not before.running[0], "the first sequence lost its blocks"

    def check_rows(self, outputs: SchedulerOutputs) -> None:
        for item in outputs.scheduled:
            end = item.start + item.num_new_tokens
            assert item.samples == (end == item.sequence.num_tokens)
            wants_all = item.sequence.params.prompt_logprobs is not None
            if wants_all and not item.sequence.num_output_tokens:
                assert item.logits_from == 0
            else:
                assert item.logits_from == item.num_new_tokens - item.samples

    def compute(self, outputs: SchedulerOutputs) -> None:
        """What a device does: write all rows, then read all tokens of each sequence up to its last row."""
        for block in outputs.blocks_to_zero:
            for offset in range(BLOCK_SIZE):
                self.cells.pop((block, offset), None)
        writers = Counter(block for item in outputs.scheduled for block in self.written_blocks(item))
        assert all(number == 1 for number in writers.values()), "a block has two writers"
        for item in outputs.scheduled:
            for position in range(item.start, item.start + item.num_new_tokens):
                self.cells[self.cell(item.sequence, position)] = known(item, position)
        for item in outputs.scheduled:
            for position in range(item.start + item.num_new_tokens):
                read = self.cells.get(self.cell(item.sequence, position))
                assert read == known(item, position), "keys and values of other tokens"

    def written_blocks(self, item: ScheduledSequence) -> list[int]:
        table, end = item.sequence.block_table, item.start + item.num_new_tokens
        assert end <= len(table) * BLOCK_SIZE, "a token outside of the block table"
        return table[item.start // BLOCK_SIZE : -(-end // BLOCK_SIZE)]

    def cell(self, sequence: Sequence, position: int) -> tuple[int, int]:
        return sequence.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE

    @invariant()
    def every_block_is_free_or_referenced(self) -> None:
        blocks = self.scheduler.block_manager
        references = Counter(block for one in self.sequences for block in one.block_table)
        assert 0 not in references
        assert len(references) + blocks.num_free_blocks == self.config.num_kv_blocks
        assert all(blocks.reference_count(block) == number for block, number in references.items())
        cached = [block for block in blocks.prefix_cache.blocks if not blocks.reference_count(block)]
        assert blocks.num_cached_blocks == len(cached)

    @invariant()
    def only_running_sequences_hold_slots_and_blocks(self) -> None:
        running = [one for one in self.sequences if one.status is SequenceStatus.RUNNING]
        slots = [one.slot for one in running]
        assert len(set(slots)) == len(slots) <= self.config.max_num_seqs
        assert None not in slots
        for one in self.sequences:
            assert one.status is SequenceStatus.RUNNING or not (one.block_table or one.slot is not None)
            assert one.num_computed_tokens <= len(one.block_table) * BLOCK_SIZE or one.is_finished()

    @invariant()
    def a_pinned_sequence_holds_all_blocks_that_it_may_need(self) -> None:
        config = self.config
        for one in self.scheduler.running_queue:
            assert one.is_pinned == (one.num_preemptions >= config.max_preemptions)
            if one.is_pinned:
                assert one.params.max_tokens is not None
                num_tokens = min(one.num_prompt_tokens + one.params.max_tokens, config.max_model_len)
                assert len(one.block_table) * BLOCK_SIZE >= min(num_tokens, config.kv_capacity)

    @invariant()
    def each_sequence_is_in_the_container_of_its_status(self) -> None:
        scheduler = self.scheduler
        for status, container in (
            (SequenceStatus.WAITING, [*scheduler.waiting_queue, *scheduler.deferred_sequences]),
            (SequenceStatus.RUNNING, scheduler.running_queue),
            (SequenceStatus.FINISHED, scheduler.finished_sequences),
        ):
            expected = [one for one in self.sequences if one.status is status]
            assert sorted(container, key=order) == sorted(expected, key=order)
        assert set(scheduler.deferred_sequences) == self.deferred
        assert len(scheduler.waiting_queue) == len(list(scheduler.waiting_queue))
        assert scheduler.running_queue == sorted(scheduler.running_queue, key=order)

    @invariant()
    def the_queue_is_in_order(self) -> None:
        queue = list(self.scheduler.waiting_queue)
        for one in by_priority(queue):
            assert one == sorted(one, key=order)
        assert self.scheduler.waiting_queue.head is (queue[0] if queue else None)

    @invariant()
    def each_waiting_sequence_has_one_reason(self) -> None:
        waiting = [one for one in self.sequences if one.status is SequenceStatus.WAITING]
        reasons = Counter(map(self.scheduler.waiting_reason, waiting))
        assert reasons == self.scheduler.waiting_reasons()
        assert reasons.total() == self.scheduler.num_waiting
        assert all(
            (self.scheduler.waiting_reason(one) in DEFERRED) == (one in self.deferred) for one in waiting
        )

    def teardown(self) -> None:
        """All requests end in a bounded number of steps, and all blocks are free then."""
        if not hasattr(self, "scheduler"):
            return
        for sequence in sorted(self.deferred, key=order):
            self.scheduler.enqueue(sequence)
        self.deferred.clear()
        tokens_left = sum(40 * 40 for one in self.sequences if not one.is_finished())
        for _ in range(tokens_left):
            if not self.scheduler.has_unfinished_sequences():
                break
            self.one_step()
        assert not self.scheduler.has_unfinished_sequences(), "livelock"
        assert self.scheduler.block_manager.num_free_blocks == self.config.num_kv_blocks


class AsynchronousMachine(SchedulerMachine):
    """Steps may be decided and launched before the one before them has ended.

    Pools and steps are small, so that preemptions and recomputation in chunks are common.
    """

    @initialize(
        config=configs(max_blocks=5, max_tokens_of_step=4),
        seed=st.integers(0, 2**32),
        decline_rate=st.sampled_from([0.0, 0.0, 0.1]),
    )
    def build(self, config: EngineConfig, seed: int, decline_rate: float) -> None:
        self.begin(config)
        rng = random.Random(seed)
        self.device = MachineDevice(self, rng, decline_rate)
        recorder = StepRecorder(self.clock)
        executor = StepExecutor(self.device, self.device, recorder)
        self.pipeline = Pipeline(self.scheduler, executor, self.stop_rules, self.device, recorder)

    @rule(lengths=st.lists(st.integers(1, 8), min_size=2, max_size=4))
    def several_arrive(self, lengths: list[int]) -> None:
        """Requests that decode for long beside each other; those of even length want logprobs."""
        for length in lengths:
            self.arrive(length, 1 + length % 2, 12, 2, 1, None, None, None if length % 2 else 1)

    @precondition(lambda self: self.scheduler.has_unfinished_sequences())
    @rule(num_steps=st.integers(2, 20))
    def several_steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.one_step()

    def one_step(
        self,
        *,
        fails: bool = False,
        data: st.DataObject | None = None,
        isolated: list[Sequence] | None = None,
    ) -> None:
        outputs, executed = self.pipeline.step(isolated)
        # `StepExecutor` attributes what the device raises to a request.
        assert self.device.error is None
        if data and outputs.scheduled and data.draw(st.booleans()):
            self.end(data.draw(st.sampled_from(outputs.scheduled)).sequence)
        tokens, finishes = dict(executed.tokens), {}
        for sequence, sampled in tokens.items():
            assert sampled == SampledToken(SAMPLED)
            if reason := self.stop_rules.reason(sequence, SAMPLED):
                finishes[sequence] = reason
        if fails and outputs.scheduled:
            failed = outputs.scheduled[0].sequence
            tokens.pop(failed, None)
            finishes[failed] = FinishReason.ERROR
        self.scheduler.update(outputs, tokens, finishes)


class MachineDevice:
    """Runner, sampler and executor of an `AsynchronousMachine`."""

    def __init__(self, machine: SchedulerMachine, rng: random.Random, decline_rate: float) -> None:
        self._machine = machine
        self._rng = rng
        self._decline_rate = decline_rate
        self.error: AssertionError | None = None

    def execute(self, outputs: SchedulerOutputs) -> None:
        try:
            assert all(item.sequence.status is SequenceStatus.RUNNING for item in outputs.scheduled)
            self._machine.compute(outputs)
        except AssertionError as failed:
            self.error = self.error or failed

    def check(self) -> None:
        """Does nothing: the device works."""

    def release_memory(self) -> bool:
        return False

    def sample(self, logits: None, items: tuple[ScheduledSequence, ...]) -> list[SampledToken]:
        return [SampledToken(SAMPLED) for item in items if item.samples]

    def prompt_logprobs(
        self, logits: None, items: tuple[ScheduledSequence, ...]
    ) -> list[tuple[ScheduledSequence, list[TokenLogprobs]]]:
        return []

    def can_launch(self, item: ScheduledSequence) -> bool:
        params = item.sequence.params
        accepts = params.prompt_logprobs is None and not (item.samples and params.logprobs is not None)
        return accepts and self._rng.random() >= self._decline_rate

    def launch(self, outputs: SchedulerOutputs, after: object) -> list[SampledToken]:
        self._fail_sometimes()
        self.execute(outputs)
        return self.sample(None, outputs.scheduled)

    def fetch(self, launched: list[SampledToken]) -> list[SampledToken]:
        self._fail_sometimes()
        return launched

    def _fail_sometimes(self) -> None:
        if self._rng.random() < self._decline_rate / 2:
            raise MemoryError("busy")


def known(item: ScheduledSequence, position: int) -> tuple[int, ...]:
    """All tokens up to `position`; placeholders are replaced by the token that every row samples."""
    return tuple(SAMPLED if token < 0 else token for token in item.sequence.token_ids[: position + 1])


def by_priority(queue: list[Sequence]) -> list[list[Sequence]]:
    groups: dict[int, list[Sequence]] = {}
    for one in queue:
        groups.setdefault(one.priority, []).append(one)
    return list(groups.values())


def order(sequence: Sequence) -> tuple[int, float, str, int]:
    return sequence.order


@pytest.mark.parametrize(("examples", "steps"), [(80, 25), (40, 80)])
@pytest.mark.parametrize("machine", [SchedulerMachine, AsynchronousMachine])
def test_the_invariants_hold(machine: type[SchedulerMachine], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
