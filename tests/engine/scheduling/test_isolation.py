"""Isolated steps: only one request is computed, and the output of every request is unchanged."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.outputs import WaitingReason
from engine.requests.deadlines import Deadlines
from engine.structured_outputs import StructuredOutputs
from tests.engine.fakes import Clock, ScriptedRunner, add, build_engine, run
from tests.engine.requests.grammars import Countdown, ScriptedCompiler
from tests.engine.scheduling.harness import Bench


def last_step(runner: ScriptedRunner) -> set[str]:
    """The ids of the requests in the last executed step."""
    return {request_id for request_id, _, _ in runner.steps[-1]}


def test_other_requests_keep_their_slots_and_blocks_and_are_not_stepped() -> None:
    engine, runner = build_engine()
    add(engine, "a", 4, max_tokens=8)
    add(engine, "b", 4, max_tokens=8)
    engine.step()
    add(engine, "c", 4, max_tokens=8)
    before = [(one.slot, list(one.block_table), one.num_tokens) for one in engine.scheduler.running_queue]

    for _ in range(3):
        step = engine.step("c")
        assert last_step(runner) == {"c"}
        assert [output.request_id for output in step.outputs] == ["c"]

    others = engine.scheduler.running_queue[:2]
    assert [(one.slot, one.block_table, one.num_tokens) for one in others] == before
    engine.step()
    assert last_step(runner) == {"a", "b", "c"}


def test_an_isolated_request_is_admitted_before_the_head_of_the_queue() -> None:
    engine, runner = build_engine(max_num_seqs=1)
    add(engine, "first", 4, max_tokens=8)
    add(engine, "isolated", 4, max_tokens=8)
    engine.step("isolated")

    assert last_step(runner) == {"isolated"}
    assert engine.queue_positions()[0].reason is WaitingReason.BEHIND


def test_the_last_running_sequence_is_preempted_for_its_slot() -> None:
    bench = Bench(max_num_seqs=2)
    first, last = bench.add(), bench.add()
    bench.step()
    isolated = bench.add()
    outputs = bench.scheduler.schedule_isolated([isolated])

    assert outputs.preempted == (last,)
    assert dict(outputs.skipped)[last] is WaitingReason.SEQ_BUDGET
    assert bench.scheduler.running_queue == [first, isolated]


def test_no_more_sequences_are_preempted_than_the_missing_blocks_require() -> None:
    bench = Bench(num_kv_blocks=8)
    a, b, c = (bench.add(prompt=7, max_tokens=1) for _ in range(3))
    bench.scheduler.schedule()
    isolated = bench.add(prompt=15)
    outputs = bench.scheduler.schedule_isolated([isolated])

    assert outputs.preempted == (c,), "four blocks are needed, two were free"
    assert bench.scheduler.running_queue == [a, b, isolated]


def test_the_first_sequence_and_pinned_ones_are_preempted_last() -> None:
    bench = Bench(num_kv_blocks=8, max_preemptions=0)
    first, second = bench.add(prompt=15, max_tokens=1), bench.add(prompt=15, max_tokens=1)
    bench.scheduler.schedule()
    assert first.is_pinned
    second.is_pinned = False
    isolated = bench.add(prompt=31, max_tokens=1)
    outputs = bench.scheduler.schedule_isolated([isolated])

    assert outputs.preempted == (second, first)
    assert [item.sequence for item in outputs.scheduled] == [isolated]


def test_a_pinned_sequence_is_preempted_after_all_others() -> None:
    bench = Bench(num_kv_blocks=8)
    first, pinned = bench.add(prompt=15, max_tokens=1), bench.add(prompt=15, max_tokens=1)
    bench.scheduler.schedule()
    pinned.is_pinned = True
    isolated = bench.add(prompt=15, max_tokens=1)

    assert bench.scheduler.schedule_isolated([isolated]).preempted == (first,)


def test_no_sequence_is_preempted_for_lack_of_budget() -> None:
    bench = Bench(max_num_prefill_seqs=1)
    running = bench.add()
    bench.step()
    outputs = bench.step(one := bench.add(), other := bench.add())

    assert [item.sequence for item in outputs.scheduled] == [one]
    assert dict(outputs.skipped) == {other: WaitingReason.PREFILL_BUDGET}
    assert running in bench.scheduler.running_queue


def test_a_step_that_preempted_for_an_output_admits_no_other_output_of_the_request() -> None:
    """Otherwise the outputs would preempt each other in turn."""
    bench = Bench(num_kv_blocks=6)
    first, last, one = (bench.add(prompt=7) for _ in range(3))
    bench.step()
    bench.step(one)
    other = bench.add(prompt=3)
    outputs = bench.step(one, other)

    assert outputs.preempted == (last,)
    assert [item.sequence for item in outputs.scheduled] == [one]
    assert dict(outputs.skipped)[other] is WaitingReason.KV_BLOCKS
    assert first in bench.scheduler.running_queue


def test_other_requests_are_preempted_before_its_own_outputs() -> None:
    bench = Bench(num_kv_blocks=6)
    first, one, other = (bench.add(prompt=7) for _ in range(3))
    bench.step()
    bench.step(one, other)

    assert bench.step(one, other).preempted == (first,)


def test_an_isolated_step_preempts_no_slot_for_a_higher_priority() -> None:
    bench = Bench(max_num_seqs=2)
    isolated, other = bench.add(), bench.add()
    bench.step()
    urgent = bench.add(priority=0)
    outputs = bench.step(isolated)

    assert outputs.preempted == ()
    assert other in bench.scheduler.running_queue
    assert urgent in bench.scheduler.waiting_queue


def test_a_decode_preempts_other_requests_for_blocks() -> None:
    bench = Bench(num_kv_blocks=4, block_size=4)
    other, isolated = bench.add(prompt=7), bench.add(prompt=7)
    bench.step()
    assert bench.step(isolated).preempted == ()
    outputs = bench.step(isolated)

    assert [item.sequence for item in outputs.scheduled] == [isolated]
    assert outputs.preempted == (other,)
    assert other in bench.scheduler.waiting_queue
    bench.run_to_end()


def test_an_isolated_request_is_not_promoted_by_another() -> None:
    bench = Bench(max_waiting_seconds=5.0, max_num_seqs=1, ageing_seconds=None)
    old = bench.add()
    bench.clock.now = 10.0
    isolated = bench.add()
    bench.scheduler.schedule_isolated([isolated])

    assert not isolated.is_promoted
    assert old in bench.scheduler.waiting_queue


def test_an_unknown_request_steps_nothing() -> None:
    engine, runner = build_engine()
    add(engine, "a", 4, max_tokens=3)
    engine.step()
    num_steps = len(runner.steps)

    assert not engine.has_request("gone")
    assert engine.has_request("a")
    assert engine.step("gone").outputs == ()
    assert len(runner.steps) == num_steps


def test_ends_and_timeouts_of_other_requests_are_reported() -> None:
    clock = Clock()
    engine, runner = build_engine(clock=clock)
    add(engine, "a", 4, max_tokens=8)
    add(engine, "late", 4, max_tokens=8, deadlines=Deadlines(timeout_seconds=5.0))
    engine.step()
    add(engine, "isolated", 4, max_tokens=8)
    engine.cancel("a")
    clock.now = 6.0
    step = engine.step("isolated")

    ends = {one.request_id: one.finish_reason.value for one in step.outputs if one.finish_reason}
    assert ends == {"a": "cancelled", "late": "timeout"}
    assert last_step(runner) == {"isolated"}


def test_all_outputs_of_the_request_are_computed() -> None:
    engine, runner = build_engine()
    add(engine, "a", 4, max_tokens=3)
    engine.step()
    add(engine, "isolated", 5, max_tokens=3, n=3)
    indexes = [one.index for _ in range(6) for one in engine.step("isolated").outputs]

    assert sorted(indexes) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert not engine.has_request("isolated")
    assert {request_id for step in runner.steps[1:] for request_id, _, _ in step} == {"isolated"}


def test_a_step_without_work_waits_for_the_grammar_of_the_isolated_request() -> None:
    """Other requests run but are not stepped: without the wait, the loop would spin."""
    compiler = ScriptedCompiler()
    engine, runner = build_engine(grammar_compiler=compiler)
    add(engine, "a", 4, max_tokens=8)
    engine.step()
    add(engine, "isolated", 4, max_tokens=8, structured_outputs=StructuredOutputs(regex="a"))
    num_steps = len(runner.steps)
    for _ in range(3):
        engine.step("isolated")

    assert compiler.num_waits == 3
    assert len(runner.steps) == num_steps
    compiler.finish(lambda: Countdown(2))
    engine.step("isolated")
    assert compiler.num_waits == 4
    assert last_step(runner) == {"isolated"}
    engine.step("isolated")
    assert not engine.has_request("isolated")


@pytest.mark.parametrize("isolated", [None, "isolated"])
def test_no_step_waits_for_the_grammar_of_another_request(isolated: str | None) -> None:
    compiler = ScriptedCompiler()
    engine, _ = build_engine(grammar_compiler=compiler)
    add(engine, "compiling", 4, max_tokens=8, structured_outputs=StructuredOutputs(regex="a"))
    add(engine, "isolated", 4, max_tokens=8)
    engine.step(isolated)
    engine.step(isolated)

    assert compiler.num_waits == 0


@given(
    st.lists(st.tuples(st.integers(1, 12), st.integers(1, 8), st.integers(1, 2)), min_size=2, max_size=5),
    st.lists(st.integers(-1, 4), max_size=20),
    st.integers(12, 16),
    st.integers(1, 4),
)
def test_isolated_steps_do_not_change_any_output(
    requests: list[tuple[int, int, int]], steps: list[int], num_kv_blocks: int, max_num_seqs: int
) -> None:
    """`requests`: prompt length, `max_tokens`, n. `steps`: the isolated request, or -1 for a common step."""
    engine, _ = build_engine(num_kv_blocks=num_kv_blocks, max_num_seqs=max_num_seqs)
    for number, (prompt_len, max_tokens, n) in enumerate(requests):
        add(engine, f"r{number}", prompt_len, max_tokens=max_tokens, n=n)
    tokens: dict[tuple[str, int], list[int]] = {}

    def step(isolated: str | None) -> None:
        for one in engine.step(isolated).outputs:
            assert isolated in (None, one.request_id)
            if one.token_id is not None:
                tokens.setdefault((one.request_id, one.index), []).append(one.token_id)

    for number in steps:
        step(None if number < 0 else f"r{number}")
    while engine.has_work:
        step(None)

    assert tokens == {
        (f"r{number}", index): list(range(100, 100 + max_tokens))
        for number, (_, max_tokens, n) in enumerate(requests)
        for index in range(n)
    }
    assert run(engine) == {}
