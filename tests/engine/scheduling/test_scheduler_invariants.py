"""Whatever the order of arrivals, steps, ends and aborts: the books balance and work goes on.

Once with each step decided after the one before, once with asynchronous scheduling and a launcher that
refuses and fails at random.
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
DRAWN = 7
HELD = (WaitingReason.GRAMMAR, WaitingReason.SIBLING)


@dataclass
class Before:
    """What a step found."""

    line: list[Sequence]
    running: list[Sequence]
    promoted: set[Sequence]
    pinned: set[Sequence]
    num_free_blocks: int

    def has_room(self, config: EngineConfig, only: list[Sequence]) -> bool:
        """Whether all of `only` could be taken in, whatever they may ever know, at nobody's cost."""
        live = [one for one in only if not one.is_finished()]
        num_new = sum(one not in self.running for one in live)
        num_missing = sum(config.max_model_len // BLOCK_SIZE - len(one.block_table) for one in live)
        return len(self.running) + num_new <= config.max_num_seqs and num_missing <= self.num_free_blocks


def configs(most_blocks: int = 14, most_tokens: int = 12) -> st.SearchStrategy[EngineConfig]:
    return st.builds(
        EngineConfig,
        max_model_len=st.just(40),
        num_kv_blocks=st.integers(3, most_blocks),
        block_size=st.just(BLOCK_SIZE),
        max_num_batched_tokens=st.integers(1, most_tokens),
        max_num_seqs=st.integers(1, 5),
        max_num_prefill_seqs=st.integers(1, 5),
        chunked_prefill=st.booleans(),
        prefix_caching=st.booleans(),
        policy=st.sampled_from(["fifo", "skip_ahead"]),
        max_skip_ahead=st.integers(1, 3),
        fair_sharing=st.booleans(),
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
        # What a device would have in each slot of each block: all tokens up to the one computed there.
        self.slots: dict[tuple[int, int], tuple[int, ...]] = {}
        self.scheduler = Scheduler(config, clock=self.clock)
        self.stop_rules = StopRules(config)
        self.sequences: list[Sequence] = []
        self.held: set[Sequence] = set()
        self.num_empty_steps = 0

    @rule(
        prompt=st.integers(1, 30),
        last=st.integers(1, 2),
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 4),
        tenant=st.sampled_from("abc"),
        n=st.sampled_from([1, 1, 1, 3]),
        held=st.sampled_from([None, None, *HELD]),
        prompt_logprobs=st.sampled_from([None, None, None, 1]),
        logprobs=st.sampled_from([None, 1]),
    )
    def arrive(
        self,
        prompt: int,
        last: int,
        max_tokens: int,
        priority: int,
        tenant: str,
        n: int,
        held: WaitingReason | None,
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
                tenant=tenant,
                cache_salt=b"" if n == 1 else b"%d" % arrival,
            )
            held = WaitingReason.SIBLING if index else held
            try:
                self.scheduler.add_sequence(sequence, held)
            except NeverFits:
                assert sequence not in self.scheduler.waiting_queue
                assert not index
                return
            self.sequences.append(sequence)
            if held:
                self.held.add(sequence)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.held, key=order)))
        self.held.remove(sequence)
        self.scheduler.release(sequence)
        self.scheduler.release(sequence)

    @rule(seconds=st.sampled_from([0.5, 2.0, 7.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds

    @precondition(lambda self: self.scheduler.has_unfinished_sequences())
    @rule(fails=st.booleans(), data=st.data())
    def step(self, fails: bool, data: st.DataObject) -> None:
        self.one_step(fails=fails, data=data)

    @precondition(lambda self: self.scheduler.has_unfinished_sequences())
    @rule(fails=st.booleans(), data=st.data(), num_steps=st.integers(1, 3))
    def step_alone(self, fails: bool, data: st.DataObject, num_steps: int) -> None:
        """One request in exclusive steps; nobody else is stepped."""
        live = [one for one in self.sequences if not one.is_finished()]
        request_id = data.draw(st.sampled_from(live)).request_id
        for _ in range(num_steps):
            only = [one for one in self.sequences if one.request_id == request_id]
            self.one_step(fails=fails, data=data, only=only)

    @precondition(lambda self: self.scheduler.has_unfinished_sequences())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        live = [one for one in self.sequences if not one.is_finished()]
        self.end(data.draw(st.sampled_from(live)))

    def end(self, sequence: Sequence) -> None:
        self.held.discard(sequence)
        self.scheduler.abort(sequence, FinishReason.CANCELLED)

    def one_step(
        self,
        *,
        fails: bool = False,
        data: st.DataObject | None = None,
        only: list[Sequence] | None = None,
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
        has_room = before.has_room(self.config, only or [])
        could_go_on = bool(only) and any(one in running or one in before.line for one in only)
        outputs = self.scheduler.schedule(only)
        self.check_budgets(outputs)
        if only is None:
            self.check_work(outputs)
            self.check_order(outputs, before)
            self.check_preemption(outputs, before)
        else:
            self.check_alone(outputs, only, before)
            assert bool(outputs.scheduled) == could_go_on, "it did not go on"
            assert not (has_room and outputs.preempted), "somebody lost for nothing"
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
                tokens[item.sequence] = SampledToken(DRAWN)
                if reason := self.stop_rules.reason(item.sequence, DRAWN):
                    finishes[item.sequence] = reason
        self.scheduler.update(outputs, tokens, finishes)

    def check_budgets(self, outputs: SchedulerOutputs) -> None:
        config = self.config
        scheduled = [item.sequence for item in outputs.scheduled]
        assert len(set(scheduled)) == len(scheduled)
        assert all(one.status is SequenceStatus.RUNNING for one in scheduled)
        num_tokens = sum(item.num_new_tokens for item in outputs.scheduled)
        assert num_tokens == outputs.num_batched_tokens <= config.max_num_batched_tokens
        assert len(scheduled) <= config.max_num_seqs
        assert len(outputs.prefill) <= config.max_num_prefill_seqs
        assert all(item.num_new_tokens == 1 for item in outputs.decode)
        assert all(item.num_new_tokens >= 1 for item in outputs.prefill)
        if not config.chunked_prefill:
            whole = [item for item in outputs.prefill if not item.sequence.num_output_tokens]
            assert all(item.samples for item in whole), "a prompt was cut, with chunked prefill off"

    def check_work(self, outputs: SchedulerOutputs) -> None:
        if outputs.scheduled or self.held == {one for one in self.sequences if not one.is_finished()}:
            self.num_empty_steps = 0
        else:
            self.num_empty_steps += 1
            assert outputs.skipped, "there is work, nothing was scheduled, and no reason is given"
            assert self.num_empty_steps < 2, "there is work, yet nothing was scheduled"

    def check_alone(self, outputs: SchedulerOutputs, only: list[Sequence], before: Before) -> None:
        """Others are not stepped, and lose what they have only to it: the last first, the pinned at last."""
        assert {item.sequence for item in outputs.scheduled} <= set(only), "another was stepped"
        others = [one for one in before.running if one not in only]
        lost = [one for one in outputs.preempted if one not in only]
        free, pinned = ([one for one in others if one.is_pinned is kind] for kind in (False, True))
        assert lost == [*reversed(free), *reversed(pinned)][: len(lost)], "not the last in order"
        own_lost = [one for one in outputs.preempted if one in only]
        assert not own_lost or lost == [*reversed(free), *reversed(pinned)], "its own before all others"

    def check_order(self, outputs: SchedulerOutputs, before: Before) -> None:
        """No one passed another of its own line, a promoted one, or, under "fifo", the head."""
        admitted = {item.sequence for item in outputs.scheduled} & set(before.line)
        if outputs.preempted and not self.took_a_slot(outputs):
            assert not admitted, "a step that preempted for blocks took others in"
        left = [one for one in before.line if one not in admitted]
        if self.config.policy == "fifo":
            for line in self.lines(before.line):
                taken = [one for one in line if one in admitted]
                assert taken == line[: len(taken)], "one passed another of its line"
        if before.promoted.intersection(left):
            assert not admitted, "one passed a promoted one"

    def lines(self, line: list[Sequence]) -> list[list[Sequence]]:
        lines: dict[tuple[int, str], list[Sequence]] = {}
        for one in line:
            key = (one.priority, one.tenant if self.config.fair_sharing else "")
            lines.setdefault(key, []).append(one)
        return list(lines.values())

    def took_a_slot(self, outputs: SchedulerOutputs) -> bool:
        reasons = dict(outputs.skipped)
        return any(reasons.get(one) is WaitingReason.SEQ_BUDGET for one in outputs.preempted)

    def check_preemption(self, outputs: SchedulerOutputs, before: Before) -> None:
        assert not before.pinned.intersection(outputs.preempted), "a pinned one lost its blocks"
        for victim in outputs.preempted:
            assert victim.num_preemptions <= self.config.max_preemptions
            if dict(outputs.skipped)[victim] is WaitingReason.SEQ_BUDGET:
                assert len(before.running) == self.config.max_num_seqs
                assert before.line[0].priority < victim.priority
                assert before.line[0] not in before.promoted
            else:
                assert victim is not before.running[0], "the first in order lost its blocks"

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
        """As a device would: rows are written, then each sequence reads all that it claims to have."""
        for block in outputs.blocks_to_zero:
            for place in range(BLOCK_SIZE):
                self.slots.pop((block, place), None)
        writers = Counter(block for item in outputs.scheduled for block in self.written_blocks(item))
        assert all(number == 1 for number in writers.values()), "a block has two writers"
        for item in outputs.scheduled:
            for position in range(item.start, item.start + item.num_new_tokens):
                self.slots[self.slot(item.sequence, position)] = known(item, position)
        for item in outputs.scheduled:
            for position in range(item.start + item.num_new_tokens):
                read = self.slots.get(self.slot(item.sequence, position))
                assert read == known(item, position), "another's keys and values"

    def written_blocks(self, item: ScheduledSequence) -> list[int]:
        table, end = item.sequence.block_table, item.start + item.num_new_tokens
        assert end <= len(table) * BLOCK_SIZE, "a token beyond the block table"
        return table[item.start // BLOCK_SIZE : -(-end // BLOCK_SIZE)]

    def slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        return sequence.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE

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
    def only_those_who_run_hold_slots_and_blocks(self) -> None:
        running = [one for one in self.sequences if one.status is SequenceStatus.RUNNING]
        slots = [one.slot for one in running]
        assert len(set(slots)) == len(slots) <= self.config.max_num_seqs
        assert None not in slots
        for one in self.sequences:
            assert one.status is SequenceStatus.RUNNING or not (one.block_table or one.slot is not None)
            assert one.num_computed_tokens <= len(one.block_table) * BLOCK_SIZE or one.is_finished()

    @invariant()
    def one_that_is_pinned_holds_all_that_it_may_ever_need(self) -> None:
        config = self.config
        for one in self.scheduler.running_queue:
            assert one.is_pinned == (one.num_preemptions >= config.max_preemptions)
            most = min(one.num_prompt_tokens + one.params.max_tokens, config.max_model_len)
            if one.is_pinned:
                assert len(one.block_table) * BLOCK_SIZE >= min(most, config.kv_capacity)

    @invariant()
    def each_stands_in_the_container_of_its_status(self) -> None:
        scheduler = self.scheduler
        for status, container in (
            (SequenceStatus.WAITING, [*scheduler.waiting_queue, *scheduler.held_sequences]),
            (SequenceStatus.RUNNING, scheduler.running_queue),
            (SequenceStatus.FINISHED, scheduler.finished_sequences),
        ):
            expected = [one for one in self.sequences if one.status is status]
            assert sorted(container, key=order) == sorted(expected, key=order)
        assert set(scheduler.held_sequences) == self.held
        assert len(scheduler.waiting_queue) == len(list(scheduler.waiting_queue))
        assert scheduler.running_queue == sorted(scheduler.running_queue, key=order)

    @invariant()
    def the_line_has_its_order(self) -> None:
        line = list(self.scheduler.waiting_queue)
        for one in self.lines(line):
            assert one == sorted(one, key=order)
        assert (self.scheduler.waiting_queue.head or None) == (line[0] if line else None)

    @invariant()
    def each_waits_for_one_reason_and_all_are_counted(self) -> None:
        waiting = [one for one in self.sequences if one.status is SequenceStatus.WAITING]
        reasons = Counter(map(self.scheduler.waiting_reason, waiting))
        assert reasons == self.scheduler.waiting_reasons()
        assert reasons.total() == self.scheduler.num_waiting
        assert all((self.scheduler.waiting_reason(one) in HELD) == (one in self.held) for one in waiting)

    def teardown(self) -> None:
        """Whatever is left comes to its end in a bounded number of steps, and nothing leaks."""
        if not hasattr(self, "scheduler"):
            return
        for sequence in sorted(self.held, key=order):
            self.scheduler.release(sequence)
        self.held.clear()
        tokens_left = sum(40 * 40 for one in self.sequences if not one.is_finished())
        for _ in range(tokens_left):
            if not self.scheduler.has_unfinished_sequences():
                break
            self.one_step()
        assert not self.scheduler.has_unfinished_sequences(), "livelock"
        assert self.scheduler.block_manager.num_free_blocks == self.config.num_kv_blocks


class AsynchronousMachine(SchedulerMachine):
    """The same, where a step may be decided and launched before the one before it has ended.

    Pools and steps are so small that preempted sequences are common, and that they are recomputed in parts.
    """

    @initialize(
        config=configs(most_blocks=5, most_tokens=4),
        seed=st.integers(0, 2**32),
        refused=st.sampled_from([0.0, 0.0, 0.1]),
    )
    def build(self, config: EngineConfig, seed: int, refused: float) -> None:  # type: ignore[override]
        self.begin(config)
        rng = random.Random(seed)
        self.device = MachineDevice(self, rng, refused)
        recorder = StepRecorder(self.clock)
        executor = StepExecutor(self.device, self.device, recorder)
        self.pipeline = Pipeline(self.scheduler, executor, self.stop_rules, self.device, recorder)

    @rule(lengths=st.lists(st.integers(1, 8), min_size=2, max_size=4))
    def several_arrive(self, lengths: list[int]) -> None:
        """And decode for long beside each other; those of even length want log-probabilities."""
        for length in lengths:
            self.arrive(length, 1 + length % 2, 12, 2, "a", 1, None, None, None if length % 2 else 1)

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
        only: list[Sequence] | None = None,
    ) -> None:
        outputs, executed = self.pipeline.step(only)
        # `StepExecutor` takes what the device raises for a fault of a request.
        assert self.device.complaint is None
        if data and outputs.scheduled and data.draw(st.booleans()):
            self.end(data.draw(st.sampled_from(outputs.scheduled)).sequence)
        tokens, finishes = dict(executed.tokens), {}
        for sequence, sampled in tokens.items():
            assert sampled == SampledToken(DRAWN)
            if reason := self.stop_rules.reason(sequence, DRAWN):
                finishes[sequence] = reason
        if fails and outputs.scheduled:
            failed = outputs.scheduled[0].sequence
            tokens.pop(failed, None)
            finishes[failed] = FinishReason.ERROR
        self.scheduler.update(outputs, tokens, finishes)


class MachineDevice:
    """Runner, sampler and launcher of an `AsynchronousMachine`; computes by `SchedulerMachine.compute`."""

    def __init__(self, machine: SchedulerMachine, rng: random.Random, refused: float) -> None:
        self._machine = machine
        self._rng = rng
        self._refused = refused
        self.complaint: AssertionError | None = None

    def execute(self, outputs: SchedulerOutputs) -> None:
        try:
            assert all(item.sequence.status is SequenceStatus.RUNNING for item in outputs.scheduled)
            self._machine.compute(outputs)
        except AssertionError as error:
            self.complaint = self.complaint or error

    def check(self) -> None:
        """The device works."""

    def release_memory(self) -> bool:
        return False

    def sample(self, logits: None, items: tuple[ScheduledSequence, ...]) -> list[SampledToken]:
        return [SampledToken(DRAWN) for item in items if item.samples]

    def prompt_logprobs(
        self, logits: None, items: tuple[ScheduledSequence, ...]
    ) -> list[tuple[ScheduledSequence, list[TokenLogprobs]]]:
        return []

    def takes(self, item: ScheduledSequence) -> bool:
        params = item.sequence.params
        takes = params.prompt_logprobs is None and not (item.samples and params.logprobs is not None)
        return takes and self._rng.random() >= self._refused

    def launch(self, outputs: SchedulerOutputs, after: object) -> list[SampledToken]:
        self._fail_sometimes()
        self.execute(outputs)
        return self.sample(None, outputs.scheduled)

    def fetch(self, launched: list[SampledToken]) -> list[SampledToken]:
        self._fail_sometimes()
        return launched

    def _fail_sometimes(self) -> None:
        if self._rng.random() < self._refused / 2:
            raise MemoryError("busy")


def known(item: ScheduledSequence, position: int) -> tuple[int, ...]:
    """A placeholder stands for the token that every row draws."""
    return tuple(DRAWN if token < 0 else token for token in item.sequence.token_ids[: position + 1])


def order(sequence: Sequence) -> tuple[int, float, str, int]:
    return sequence.order


@pytest.mark.parametrize(("examples", "steps"), [(80, 25), (40, 80)])
@pytest.mark.parametrize("machine", [SchedulerMachine, AsynchronousMachine])
def test_the_books_balance(machine: type[SchedulerMachine], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
